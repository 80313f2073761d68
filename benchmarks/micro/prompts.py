"""Measures the time of prompts with the plugin's attention and with vLLM's, in turns.

    python benchmarks/micro/prompts.py --out prompts.json

SmolLM2-135M-Instruct with its shipped drafter, bfloat16, one request at a time, in this process with the threads of a
server's worker.  A prompt consists of random tokens; its time is that to its first token.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

from vllm_specplug.cpu import attention as cpu
from vllm_specplug.utils.environment import provenance
from vllm_specplug.utils.tables import format_table
from vllm_specplug.vllm.probes.in_process import start_smollm2

LENGTHS = (32, 128, 256, 512, 1024, 1536)
WAYS = {"plugin": cpu.TreeAttentionImpl._is_ours, "vLLM": lambda *_: False}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    from vllm import SamplingParams

    llm = start_smollm2({"method": "eagle2", "model": "smollm2-135m-instruct"})
    params, draw, found = SamplingParams(temperature=0, max_tokens=1), random.Random(0), {}
    for length in LENGTHS:
        spent: dict[str, list[float]] = {way: [] for way in WAYS}
        for turn in range(args.repeats + 1):
            for way in list(WAYS)[:: 1 if turn % 2 else -1]:
                cpu.TreeAttentionImpl._is_ours = WAYS[way]
                prompt = {"prompt_token_ids": [draw.randrange(1000, 40000) for _ in range(length)]}
                begin = time.perf_counter()
                llm.generate([prompt], params, use_tqdm=False)
                if turn:  # the first one warms up
                    spent[way].append((time.perf_counter() - begin) * 1e3)
        found[length] = {way: round(statistics.median(times), 2) for way, times in spent.items()}
    origin = provenance(baseline="vLLM's attention in the same engine, in turns")
    args.out.write_text(json.dumps({"provenance": origin, "milliseconds": found}, separators=(",", ":")) + "\n")
    rows = [
        [str(n), *(f"{ms:.1f}" for ms in one.values()), f"{one['vLLM'] / one['plugin']:.2f}x"]
        for n, one in found.items()
    ]
    print(format_table(["tokens", *(f"{way} ms" for way in WAYS), "ratio"], rows))


if __name__ == "__main__":
    main()
