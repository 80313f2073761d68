"""Measures the draft phase of `eagle2` in one C++ operator, in one for each level, and with vLLM's model of the head.

    python benchmarks/micro/draft_phase.py --questions spec_bench_dev.jsonl --out draft_phase.json

SmolLM2-135M-Instruct with its shipped drafter, bfloat16, one request at a time, in this process with the threads of a
server's worker.  Each question is answered in all ways, in an order that changes; a second engine has drafts in 8 bits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.smollm2 import start_smollm2
from vllm_specplug.bench.questions import read_questions
from vllm_specplug.utils.environment import multiplies_bytes, provenance
from vllm_specplug.utils.tables import format_table
from vllm_specplug.vllm.drafters.eagle_levels import EagleLevels
from vllm_specplug.vllm.probes.bench_worker import prompts_of
from vllm_specplug.vllm.probes.in_process import runner_of


@dataclass
class Spent:
    """What one way of drafting took, in seconds: each draft phase, its parts, and the answers."""

    phases: list[float] = field(default_factory=list)
    levels: list[float] = field(default_factory=list)  # forwards after the first one
    scores: list[float] = field(default_factory=list)  # the LM head, and the choice of children
    seconds: float = 0.0
    tokens: int = 0

    def summary(self) -> dict[str, Any]:
        return {
            "draft phases": len(self.phases),
            "levels": len(self.levels),
            "median draft phase ms": _median_ms(self.phases),
            "median level ms": _median_ms(self.levels),
            "median scoring ms": _median_ms(self.scores),
            "tokens": self.tokens,
            "ms per token": round(self.seconds / self.tokens * 1e3, 3),
        }


def _median_ms(seconds: list[float]) -> float | None:
    """Return None where nothing was timed: in one call, a draft phase has no parts."""
    return round(statistics.median(seconds) * 1e3, 3) if seconds else None


def measure(questions: list[str], max_tokens: int, draft_int8: bool) -> dict[str, dict[str, Any]]:
    """Return what drafting takes, by who computes it."""
    from vllm import SamplingParams

    llm = start_smollm2({"method": "eagle2", "model": "smollm2-135m-instruct", "draft_int8": draft_int8})
    runner = runner_of(llm)
    operator = runner.drafter.operator
    assert operator is not None, "the operators cannot run here"
    ways = {"vLLM's model": (None, False), "operators": (operator, False), "one operator": (operator, True)}
    drafter, vocabulary = runner.drafter, runner.drafter._vocabulary_at_once
    spent = {name: Spent() for name in ways}
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    current = Spent()

    def timed(owner: Any, name: str, part: str) -> None:
        call = getattr(owner, name)

        def measured(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = call(*args, **kwargs)
            getattr(current, part).append(time.perf_counter() - begin)
            return result

        setattr(owner, name, measured)

    timed(runner, "propose_draft_token_ids", "phases")
    timed(drafter, "_score", "scores")
    timed(operator, "forward", "levels")
    timed(EagleLevels, "forward", "levels")
    for turn, question in enumerate([*questions[:2], *questions]):
        for name in list(ways)[:: 1 if turn % 2 else -1]:
            current = Spent() if turn < 2 else spent[name]  # warm-up
            drafter.operator, is_one_call = ways[name]
            drafter._vocabulary_at_once = vocabulary if is_one_call else lambda: None
            prompts = prompts_of(llm, [question], max_tokens)
            begin = time.perf_counter()
            (output,) = llm.generate(prompts, params, use_tqdm=False)
            current.seconds += time.perf_counter() - begin
            current.tokens += len(output.outputs[0].token_ids)
    return {name: one.summary() for name, one in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", required=True, type=Path)
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    questions = [question.text for question in read_questions(args.questions, args.limit)]
    found = {"bfloat16": measure(questions, args.max_tokens, draft_int8=False)}
    if multiplies_bytes():
        found["8 bits"] = measure(questions, args.max_tokens, draft_int8=True)
    origin = provenance(baseline="vLLM's model of the same head on the same engine, questions in turns")
    args.out.write_text(json.dumps({"provenance": origin, "result": found}, indent=2) + "\n")
    rows = [[drafts, name, *map(str, one.values())] for drafts, ways in found.items() for name, one in ways.items()]
    titles = list(found["bfloat16"]["one operator"])
    print(format_table(["drafts in", "computed by", *titles], rows))


if __name__ == "__main__":
    main()
