"""End to end: tokens/s of ``eagle2`` against plain vLLM, stock n-gram and the stock EAGLE chain, in one run.

    SPECPLUG_QUESTIONS=spec_bench.jsonl pytest benchmarks/test_end_to_end.py --benchmark-json=out.json

Questions are not part of this repository.  The chain gets three lengths, so that it is met at its best one.  The
results go to ``.benchmarks/end_to_end.json``; ``specplug bench --table FILE --into README.md`` publishes them.
"""

import argparse
import json
import os
from pathlib import Path

import pytest

from vllm_specplug import bench
from vllm_specplug.config import shipped_drafters

NUM_QUESTIONS = 40
CHAIN_LENGTHS = (1, 2, 3)
BAR = 1.25
OUTPUT = Path(__file__).parents[1] / ".benchmarks" / "end_to_end.json"


@pytest.fixture(scope="module")
def questions() -> Path:
    path = os.environ.get("SPECPLUG_QUESTIONS")
    if not path:
        pytest.skip("set SPECPLUG_QUESTIONS to a JSONL file of questions (Spec-Bench, HumanEval or GSM8K layout)")
    if not Path(path).is_file():
        pytest.skip(f"SPECPLUG_QUESTIONS={path} does not exist")
    if "smollm2-135m-instruct" not in shipped_drafters("eagle2"):
        pytest.skip("no drafter for SmolLM2-135M-Instruct is shipped in this checkout")
    return Path(path)


def test_eagle2_is_faster(benchmark, questions):
    chains = [f"eagle-chain:k{length}" for length in CHAIN_LENGTHS]
    argv = ["--questions", str(questions), "--limit", str(NUM_QUESTIONS), "--dtype", "bfloat16"]
    argv += ["--methods", ",".join(["plain", "ngram", *chains, "eagle2"])]
    for name, length in zip(chains, CHAIN_LENGTHS, strict=True):
        argv += ["--method-config", f"{name}={json.dumps({'num_speculative_tokens': length})}"]
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    report = benchmark.pedantic(bench.run_benchmark, args=(parser.parse_args(argv),), rounds=1)
    print("\n" + bench.render(report))
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nwritten to {OUTPUT}")
    overall = {name: method["overall"] for name, method in report["methods"].items()}
    best_chain = max(chains, key=lambda name: overall[name]["tokens_per_s"])
    ratios = {
        "over plain": overall["eagle2"]["speedup"],
        f"over the stock chain at its best ({best_chain})": overall["eagle2"]["speedup"]
        / overall[best_chain]["speedup"],
        "over n-gram": overall["eagle2"]["speedup"] / overall["ngram"]["speedup"],
    }
    benchmark.extra_info.update(report["provenance"] | {"settings": report["settings"], "ratios": ratios})
    benchmark.extra_info["overall"] = overall
    for what, ratio in ratios.items():
        print(f"eagle2 is {ratio:.2f}x {what}; the bar is {BAR}x")
