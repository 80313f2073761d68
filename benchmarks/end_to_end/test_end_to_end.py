"""Measures tokens/s of ``eagle2``, lookup and a union against plain vLLM, its n-gram method and its EAGLE chain.

    SPECPLUG_QUESTIONS=spec_bench.jsonl pytest benchmarks/end_to_end/test_end_to_end.py --benchmark-json=out.json

Questions are not part of this repository.  All are measured in one run; a short one before it finds the chain's best
length.  The results go to ``.benchmarks/end_to_end.json``; ``specplug bench --table FILE --short --into PAGE``
publishes them.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest

from vllm_specplug.bench.command import add_arguments, run_benchmark
from vllm_specplug.bench.results import render

NUM_QUESTIONS, MAX_TOKENS = 40, 96
CHAIN_LENGTHS = (1, 2, 3)
LENGTH_QUESTIONS = 12
BAR = 1.25
OUTPUT = Path(__file__).parents[2] / ".benchmarks" / "end_to_end.json"


@pytest.fixture(scope="module")
def questions() -> Path:
    path = os.environ.get("SPECPLUG_QUESTIONS")
    if not path:
        pytest.skip("set SPECPLUG_QUESTIONS to a JSONL file of questions (Spec-Bench, HumanEval or GSM8K layout)")
    if not Path(path).is_file():
        pytest.skip(f"SPECPLUG_QUESTIONS={path} does not exist")
    return Path(path)


def run(questions: Path, limit: int, methods: list[str], lengths: dict[str, int]) -> dict[str, Any]:
    """Run ``specplug bench`` with chains of those lengths, by method."""
    argv = ["--questions", str(questions), "--limit", str(limit), "--max-tokens", str(MAX_TOKENS)]
    argv += ["--methods", ",".join(methods)]
    for name, length in lengths.items():
        argv += ["--method-config", f"{name}={json.dumps({'num_speculative_tokens': length})}"]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run_benchmark(parser.parse_args(argv))


def test_eagle2_is_faster(benchmark, questions):
    chains = {f"eagle-chain:k{length}": length for length in CHAIN_LENGTHS}
    found = run(questions, LENGTH_QUESTIONS, ["plain", *chains], chains)["methods"]
    speeds = {chains[name]: found[name]["overall"]["speedup"] for name in chains}
    length = max(speeds, key=speeds.get)
    print(f"\nthe chain over plain by length: {speeds}")
    methods = ["plain", "ngram", "eagle-chain", "eagle2", "lookup", "union"]
    report = benchmark.pedantic(run, args=(questions, NUM_QUESTIONS, methods, {"eagle-chain": length}), rounds=1)
    report["chain_lengths"] = speeds
    print("\n" + render(report))
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nwritten to {OUTPUT}")
    speedup = {name: method["overall"]["speedup"] for name, method in report["methods"].items()}
    ratios = {f"over {name}": speedup["eagle2"] / speedup[name] for name in ("plain", "ngram", "eagle-chain")}
    benchmark.extra_info.update(report["provenance"] | {"settings": report["settings"], "ratios": ratios})
    benchmark.extra_info["speedup"] = speedup
    for what, ratio in ratios.items():
        print(f"eagle2 is {ratio:.2f}x {what}; the bar over plain and over the chain is {BAR}x")
