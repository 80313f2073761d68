"""Compares drafters of one target by what they accept, one engine after the other: for machines with little memory.

    python -m benchmarks.end_to_end.heads --target DIR --questions FILE --out FILE NAME=JSON [NAME=JSON ...]

JSON is a speculative configuration, vLLM's or the plugin's, or null. Each engine runs eagerly, in float32, in a process
of its own, and answers one question at a time. `specplug bench` keeps all engines in memory and asks them in turns, so
its speeds can be compared; the milliseconds here depend on what else runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from vllm_specplug.bench.questions import read_questions
from vllm_specplug.utils.environment import provenance

NODES = "vllm:spec_decode_num_draft_tokens"
RESULT = "RESULT "


def nodes_of(llm: Any) -> int:
    """Return the number of tokens drafted so far."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == NODES)


def measure(config: dict[str, Any] | None, args: argparse.Namespace) -> dict[str, Any]:
    """Start an engine in this process and answer the questions; the first one is asked before, too."""
    from vllm_specplug.vllm.probes.bench_worker import answer
    from vllm_specplug.vllm.probes.in_process import start_in_process
    from vllm_specplug.vllm.probes.step_parts_probe import PartsClock

    engine = {"model": args.target, "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 8, "enforce_eager": True}
    engine |= {"kv_cache_memory_bytes": 256 << 20, "enable_prefix_caching": False, "disable_log_stats": False}
    llm = start_in_process(engine | ({"speculative_config": config} if config else {}))
    clock, texts = PartsClock(llm), [question.text for question in read_questions(args.questions)]
    answer(llm, texts[:1], 8)
    clock.steps.clear()
    nodes = nodes_of(llm)
    found = answer(llm, texts, args.max_tokens, at_once=1)
    drafts, accepted = found["drafts"], [count for count in found["accepted_by_depth"] if count]
    return {
        "config": config,
        "tau": 1 + sum(accepted) / max(drafts, 1),
        "drafts": drafts,
        "accepted_by_depth": accepted,
        "alpha": [round(count / tried, 4) for tried, count in zip([drafts, *accepted], accepted, strict=False)],
        "nodes_per_draft": round((nodes_of(llm) - nodes) / max(drafts, 1), 2),
        "tokens_per_s": round(sum(map(len, found["token_ids"])) / found["seconds"], 2),
        "parts_of_a_step": clock.mean_parts(),
        "token_ids": found["token_ids"],
    }


def in_own_process(text: str) -> dict[str, Any]:
    """Measure a configuration, given as JSON, in a new process with the same arguments."""
    run = subprocess.run([sys.executable, "-m", __spec__.name, *sys.argv[1:], "--one", text], stdout=subprocess.PIPE)
    lines = [line for line in run.stdout.decode().splitlines() if line.startswith(RESULT)]
    if run.returncode or not lines:
        raise RuntimeError(f"no result of {text}: its log is above")
    return json.loads(lines[-1].removeprefix(RESULT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--questions", required=True, type=Path)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--out", required=True, type=Path, help="methods that it has already are not measured again")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("methods", nargs="+", metavar="NAME=JSON")
    args = parser.parse_args()
    if args.one is not None:
        print(RESULT + json.dumps(measure(json.loads(args.one), args)))
        return
    report = {"provenance": provenance("the first method, same questions"), "methods": {}}
    if args.out.exists():
        report = json.loads(args.out.read_text())
    for name, _, text in (method.partition("=") for method in args.methods):
        if name in report["methods"]:
            continue
        row = in_own_process(text)
        token_ids = row.pop("token_ids")
        first = report.setdefault("answers", token_ids)
        row["same_answers"] = f"{sum(map(list.__eq__, first, token_ids))} of {len(first)}"
        report["methods"][name] = row
        args.out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"{name}: tau {row['tau']:.3f}, alpha {row['alpha']}, {row['nodes_per_draft']} nodes", flush=True)


if __name__ == "__main__":
    main()
