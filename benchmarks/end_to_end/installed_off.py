"""Measures what the plugin costs where it is installed and none of its methods is configured.

    python -m benchmarks.end_to_end.installed_off --out benchmarks/results/installed_off.json

Two plain engines of the tiny model, one with the plugin and one with no plugin at all, answer the same batches in turn.
The model is so small that a step is nearly all of vLLM's Python, where a cost would show first.  Answers must be equal.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path

from tests.doubles import tiny
from vllm_specplug.bench.methods import Method
from vllm_specplug.bench.questions import Question
from vllm_specplug.bench.workers import Worker, started
from vllm_specplug.utils.environment import provenance
from vllm_specplug.utils.tables import format_table

CLEAN, INSTALLED = "plain", "installed"  # the first runs without plugins
BATCH, TOKENS = 4, 128


def step_seconds(worker: Worker, questions: list[Question]) -> tuple[float, list[list[int]]]:
    """Return the seconds per decode step of one batch, and its answers."""
    found = worker.generate(questions, TOKENS, sampling={"temperature": 0, "ignore_eos": True})
    return found.seconds / TOKENS, found.token_ids


def interval(ratios: list[float], draws: int = 2000) -> list[float]:
    """Return the 95% interval of the medians of resampled ratios."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(draws))
    return [medians[draws // 40], medians[-draws // 40]]


def main(argv: list[str] | None = None) -> int:
    """Run it; return 1 if answers differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--out", type=Path, help="where the result goes, as JSON")
    options = parser.parse_args(argv)
    questions = [Question(str(i), "none", "count the lights " + "again " * i) for i in range(BATCH)]
    seconds: dict[str, list[float]] = {CLEAN: [], INSTALLED: []}
    peaks, different = {}, 0
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.write_target(Path(folder) / "target")
        tiny.write_tokenizer(model)
        engine = {"model": str(model), "dtype": "float32", "max_model_len": 256, "disable_log_stats": False}
        methods = [Method(CLEAN, None), Method(INSTALLED, None)]
        with started(methods, {**engine, "enforce_eager": True}, kv_gib=1) as workers:
            for worker in workers:
                for _ in range(3):
                    step_seconds(worker, questions)
            for number in range(options.rounds):
                answers = []
                for worker in workers[:: 1 if number % 2 else -1]:
                    found, tokens = step_seconds(worker, questions)
                    seconds[worker.method.label].append(found)
                    answers.append(tokens)
                different += answers[0] != answers[1]
                print(f"\r  round {number + 1}/{options.rounds}", end="", file=sys.stderr, flush=True)
            print(file=sys.stderr)
            peaks = {worker.method.label: worker.close() for worker in workers}
    ratios = [ours / clean for ours, clean in zip(seconds[INSTALLED], seconds[CLEAN], strict=True)]
    result = {
        "step_ms": {name: round(1e3 * statistics.median(times), 4) for name, times in seconds.items()},
        "ratio_of_step_times": round(statistics.median(ratios), 4),
        "interval_95": [round(bound, 4) for bound in interval(ratios)],
        "peak_rss_mib": peaks,
        "rounds": options.rounds,
        "rounds_with_different_answers": different,
    }
    rows = [[name, f"{result['step_ms'][name]:.3f}", str(peaks[name])] for name in seconds]
    print(format_table(["engine", "ms per step (median)", "peak MiB"], rows))
    print(f"ratio {result['ratio_of_step_times']:.3f}, 95%: {result['interval_95']}; {different} answers differ")
    if options.output:
        report = {**result, "settings": {"batch": BATCH, "tokens": TOKENS, **engine, "model": "tiny, random"}}
        report["provenance"] = provenance("plain vLLM with VLLM_PLUGINS='', taking turns in one run")
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
