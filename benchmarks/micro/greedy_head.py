"""Measures the LM head in greedy steps: all logits, and only those that may be the largest, in turns.

    python benchmarks/micro/greedy_head.py --questions spec_bench_dev.jsonl --out greedy_head.json

SmolLM2-135M-Instruct with its shipped drafter, one request at a time, in this process with the threads of a server's
worker.  Every other step computes all logits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.smollm2 import start_smollm2
from vllm_specplug.bench.questions import read_questions
from vllm_specplug.utils.environment import provenance
from vllm_specplug.utils.tables import format_table
from vllm_specplug.vllm.probes.bench_worker import prompts_of
from vllm_specplug.vllm.probes.in_process import runner_of

#: Rows of which there are fewer calls are left out.
LEAST_CALLS = 20


def measure(questions: list[str], max_tokens: int, dtype: str) -> dict[int, dict[str, Any]]:
    """Return what the head takes by rows of the step."""
    from vllm import SamplingParams

    llm = start_smollm2({"method": "eagle2", "model": "smollm2-135m-instruct"}, dtype)
    model, head = runner_of(llm).model, runner_of(llm).greedy_head
    assert head is not None, "this CPU computes all logits"
    compute, seconds, shares, steps = model.compute_logits, defaultdict(list), defaultdict(list), 0

    def timed(hidden: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps % 2:
            head.expect(False)
        begin = time.perf_counter()
        logits = compute(hidden)
        seconds[len(hidden), steps % 2].append(time.perf_counter() - begin)
        if not steps % 2:
            shares[len(hidden)].append(float((logits[0] > float("-inf")).float().mean()))
        return logits

    model.compute_logits = timed
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    for number, question in enumerate([*questions[:2], *questions]):
        if number == 2:  # after the warm-up
            seconds.clear()
            shares.clear()
        llm.generate(prompts_of(llm, [question], max_tokens), params, use_tqdm=False)
    return {
        rows: {
            "steps": len(shares[rows]),
            "all logits, median ms": round(statistics.median(seconds[rows, 1]) * 1e3, 3),
            "some logits, median ms": round(statistics.median(seconds[rows, 0]) * 1e3, 3),
            "computed share, mean": round(statistics.mean(shares[rows]), 4),
        }
        for rows in sorted(shares)
        if min(len(seconds[rows, 0]), len(seconds[rows, 1])) >= LEAST_CALLS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", required=True, type=Path)
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    questions = [question.text for question in read_questions(args.questions, args.limit)]
    if not (found := measure(questions, args.max_tokens, args.dtype)):
        parser.error(f"no number of rows had {LEAST_CALLS} steps of each kind: raise --limit or --max-tokens")
    origin = provenance(baseline="all logits by the same operator on the same engine, steps in turns")
    args.out.write_text(json.dumps({"provenance": origin, "by_rows": found}, indent=2) + "\n")
    titles = list(next(iter(found.values())))
    print(format_table(["rows", *titles], [[str(rows), *map(str, one.values())] for rows, one in found.items()]))


if __name__ == "__main__":
    main()
