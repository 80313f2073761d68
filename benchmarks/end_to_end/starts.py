"""Measures how long a server takes until it answers: plain vLLM and methods with drafts, first and later starts.

    python -m benchmarks.end_to_end.starts --out starts.json [--methods eagle2,union] [--dtype float32]

The target is SmolLM2.  A first start has empty caches, vLLM's and ours, and compiles everything.  Later ones find them
filled.  Servers start one after the other, in turns.  The file is written after each start.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

from vllm_specplug.bench.methods import BASELINE, Method, parse_methods
from vllm_specplug.cli.server_process import Server, wait_until_ready
from vllm_specplug.utils.environment import provenance
from vllm_specplug.utils.smollm2 import prepare

#: Environment variables that name folders of compiled code and of measurements.
CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME")
#: Longest time in seconds that a start may take.
LIMIT = 1800


def seconds_until_ready(method: Method, target: Path, dtype: str, caches: Path) -> float:
    """Start a server with its caches in a folder, wait until it answers, and stop it."""
    caches.mkdir(exist_ok=True)
    os.environ.update({name: str(caches / name.lower()) for name in CACHES})
    options = ["--dtype", dtype, "--max-model-len", "2048", "--max-num-seqs", "8"]
    if method.config is not None:
        options += ["--speculative-config", json.dumps(method.config)]
    server = Server(method.label, target, options, caches / "log.txt", plugins=not method.stock)
    try:
        wait_until_ready([server], LIMIT)
    finally:
        server.stop()
    return server.ready_after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="eagle2,union", help="methods of `specplug bench`, beside plain")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--later", type=int, default=2, help="starts with filled caches")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON file for the results")
    args = parser.parse_args()
    if args.later < 1:
        parser.error(f"--later must be at least 1, not {args.later}")
    target, methods = Path(prepare()), parse_methods(f"{BASELINE},{args.methods}")
    origin = provenance(baseline="plain vLLM's server, started in turns")
    found: dict[str, list[float]] = {method.label: [] for method in methods}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(1 + args.later):
            for method in methods:
                seconds = seconds_until_ready(method, target, args.dtype, Path(folder) / method.label)
                found[method.label].append(round(seconds, 1))
                args.out.write_text(json.dumps({"provenance": origin, "dtype": args.dtype, "seconds": found}) + "\n")
    plain = found[BASELINE]
    for name, times in found.items():
        later, later_plain = statistics.median(times[1:]), statistics.median(plain[1:])
        ratios = f"{times[0] / plain[0]:.2f}x, {later / later_plain:.2f}x"
        print(f"{name}: first {times[0]:.0f} s, later {later:.0f} s ({ratios} of plain's)")


if __name__ == "__main__":
    main()
