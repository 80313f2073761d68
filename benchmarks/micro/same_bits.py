"""Measures the cost of equal bits: the plugin's attention for all rows against vLLM's for rows without trees, in turns.

    python -m benchmarks.micro.same_bits --questions spec_bench_dev.jsonl --out same_bits.json

SmolLM2-135M-Instruct with its shipped drafter, bfloat16, in this process with the threads of a server's worker.  The
time of a prompt of random tokens is that to its first token; answers are to questions at once, with and without drafts.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.smollm2 import start_smollm2
from vllm_specplug.bench.questions import read_questions
from vllm_specplug.cpu import attention as cpu
from vllm_specplug.utils.environment import provenance
from vllm_specplug.utils.tables import format_table

LENGTHS = (32, 128, 256, 512, 1024)
BATCHES = (1, 8, 32)
WAYS = {"plugin": cpu.TreeAttentionImpl._is_ours, "vLLM": lambda *_: False}


def in_turns(run: Any, repeats: int) -> dict[str, float]:
    """Return the median milliseconds of ``run`` by way; the first turn warms up."""
    spent: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(repeats + 1):
        for way in list(WAYS)[:: 1 if turn % 2 else -1]:
            cpu.TreeAttentionImpl._is_ours = WAYS[way]
            begin = time.perf_counter()
            run()
            if turn:
                spent[way].append((time.perf_counter() - begin) * 1e3)
    return {way: round(statistics.median(times), 2) for way, times in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", required=True, type=Path)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    from vllm import SamplingParams

    method = {"method": "eagle2", "model": "smollm2-135m-instruct"}
    llm = start_smollm2(method, max_num_seqs=max(BATCHES), kv_cache_memory_bytes=1 << 30)
    draw, found = random.Random(0), {}
    for length in LENGTHS:
        params = SamplingParams(temperature=0, max_tokens=1)

        def read(length: int = length, params: Any = params) -> None:
            prompt = {"prompt_token_ids": [draw.randrange(1000, 40000) for _ in range(length)]}
            llm.generate([prompt], params, use_tqdm=False)

        found[f"prompt of {length}"] = in_turns(read, args.repeats)
    questions = read_questions(args.questions, max(BATCHES))
    for batch in BATCHES:
        chats = [[{"role": "user", "content": question.text}] for question in questions[:batch]]
        for drafts in (True, False):
            arguments = {} if drafts else {"extra_args": {"speculation": False}}
            params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True, **arguments)

            def answer(chats: Any = chats, params: Any = params) -> None:
                llm.chat(chats, params, use_tqdm=False)

            name = f"{batch} at once, {'with' if drafts else 'without'} drafts"
            found[name] = in_turns(answer, args.repeats)
    origin = provenance(baseline="vLLM's attention for rows without trees, in the same engine, in turns")
    args.out.write_text(json.dumps({"provenance": origin, "milliseconds": found}, separators=(",", ":")) + "\n")
    rows = [
        [name, *(f"{ms:.1f}" for ms in one.values()), f"{one['plugin'] / one['vLLM']:.3f}"]
        for name, one in found.items()
    ]
    print(format_table(["", *(f"{way} ms" for way in WAYS), "ratio"], rows))


if __name__ == "__main__":
    main()
