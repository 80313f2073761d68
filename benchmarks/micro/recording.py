"""Measures what recording costs a step: its own time in steps, and speed with and without it, in turns, on one engine.

    python benchmarks/micro/recording.py --questions spec_bench_dev.jsonl --out recording.json

SmolLM2-135M-Instruct with its shipped drafter, bfloat16, in this process.  Each group of questions is answered twice,
recorded and with ``{"record": false}``; the order changes from group to group.  The ratios are those of pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm_specplug.bench.questions import read_questions
from vllm_specplug.cpu.recording import Recorder
from vllm_specplug.utils.environment import provenance
from vllm_specplug.utils.smollm2 import prepare
from vllm_specplug.vllm.probes.bench_worker import prompts_of


class Timer:
    """Adds up the seconds that a method of the recorder takes."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for name in ("read", "finish"):
            setattr(Recorder, name, self._timed(getattr(Recorder, name)))

    def _timed(self, method: Any) -> Any:
        def timed(*args: Any) -> None:
            begin = time.perf_counter()
            method(*args)
            self.seconds += time.perf_counter() - begin

        return timed


def answer(llm: Any, texts: list[str], max_tokens: int, record: bool) -> tuple[float, int]:
    """Answer questions at once; return seconds and tokens."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, extra_args={"record": record})
    prompts = prompts_of(llm, texts, max_tokens)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begin, sum(len(output.outputs[0].token_ids) for output in outputs)


def measure(questions: list[str], max_tokens: int, batch: int, folder: str) -> dict[str, Any]:
    """Return the shares and the ratios of one batch size."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
    from vllm import LLM

    speculation = {"method": "eagle2", "model": "smollm2-135m-instruct", "record": folder}
    llm = LLM(
        str(prepare()),
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=max(batch, 1),
        kv_cache_memory_bytes=256 << 20,
        enable_prefix_caching=False,
        speculative_config=speculation,
    )
    timer = Timer()
    groups = [questions[first : first + batch] for first in range(0, len(questions) - batch + 1, batch)]
    answer(llm, groups[0], max_tokens, record=True)  # warm-up
    ratios, recorded_s, own_s, tokens = [], 0.0, 0.0, 0
    for turn, group in enumerate(groups):
        seconds = {}
        for record in (True, False) if turn % 2 else (False, True):
            before = timer.seconds
            seconds[record], count = answer(llm, group, max_tokens, record)
            if record:
                recorded_s, own_s, tokens = recorded_s + seconds[True], own_s + timer.seconds - before, tokens + count
        ratios.append(seconds[True] / seconds[False])
    return {
        "requests at once": batch,
        "groups": len(groups),
        "tokens": tokens,
        "own share of the time": round(own_s / recorded_s, 5),
        "time with over without, median of pairs": round(statistics.median(ratios), 4),
        "pairs": [round(ratio, 3) for ratio in ratios],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", required=True, type=Path)
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--note", default="", help="kept in the result, for example that the machine was loaded")
    args = parser.parse_args()
    questions = [question.text for question in read_questions(args.questions, args.limit)]
    with tempfile.TemporaryDirectory() as folder:
        found = measure(questions, args.max_tokens, args.at_once, str(Path(folder) / "ring"))
    origin = provenance(baseline="the same engine and questions with record: false, in turns")
    report = {"provenance": origin, "note": args.note, "result": found}
    args.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
