"""Runs steps of ``gpu.py`` in one process: questions as lines of JSON on stdin, answers as lines of JSON on stdout.

An answer has ``row`` (as soon as it is measured; ``problem`` in it says what is wrong with the result), or at the end
of each step ``done``: ``passed``, ``failed``, ``skipped``, or in a dry run ``reached`` (the device), with ``reason``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.fake_device import end_of_dry_run, install

Row = dict[str, Any]

#: Of each part: the generator of its rows.
PARTS = {
    "device": "benchmarks.gpu.gpu_worker:describe",
    "attention": "benchmarks.gpu.attention:measure",
    "check_growth": "benchmarks.gpu.drafting:check_growth",
    "drafting": "benchmarks.gpu.drafting:measure",
    "search": "benchmarks.gpu.drafting:measure_search",
    "dense_step": "benchmarks.gpu.dense_step:measure",
    "identity": "benchmarks.gpu.engines:check_identity",
    "speed": "benchmarks.gpu.engines:time_steps",
}


def describe(question: Row) -> Iterator[Row]:
    """Describe the device.

    Raises:
        RuntimeError: there is none, and the step is not interpreted.
    """
    import torch
    import triton

    from benchmarks.gpu.device import bandwidth_gb_s

    found: Row = {"name": "none: Triton's interpreter", "torch": torch.__version__, "triton": triton.__version__}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "bandwidth_gb_s": round(bandwidth_gb_s(), 1),
        }
    elif not question["interpret"]:
        raise RuntimeError("there is no CUDA device; --interpret checks the script itself, on a CPU")
    yield found


def answer(question: Row) -> Iterator[Row]:
    """Run one step; yield its rows, then how it ended."""
    from benchmarks.gpu.device import Skip

    problems = []
    try:
        module, _, function = PARTS[question["part"]].partition(":")
        for row in getattr(importlib.import_module(module), function)(question):
            problems += [row["problem"]] if "problem" in row else []
            yield {"row": row}
    except Skip as reason:
        yield {"done": "skipped", "reason": str(reason)}
        return
    except Exception as error:
        if question["dry_run"] and (where := end_of_dry_run(error)):
            yield {"done": "reached", "reason": where}
            return
        first = str(error).partition("\n")[0][:300]
        trace = traceback.format_exc().splitlines()[-25:]
        yield {"done": "failed", "reason": f"{type(error).__name__}: {first}", "traceback": trace}
        return
    yield {"done": "failed", "reason": "; ".join(problems)} if problems else {"done": "passed"}


def main() -> None:
    # Answers only on the real stdout; what libraries print goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        question = json.loads(line)
        if question["interpret"] and os.environ.get("TRITON_INTERPRET") != "1":
            from tests.doubles.interpreter import use_interpreter

            use_interpreter()
        if question["dry_run"] and "torch" not in sys.modules:
            install()
        for found in answer(question):
            print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    sys.modules["benchmarks.gpu.gpu_worker"] = sys.modules["__main__"]
    main()
