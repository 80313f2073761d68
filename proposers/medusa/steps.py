"""`specplug steps`: measure the time of a step by rows and batch in vLLM on this machine.

With tau by tree size, these times give the fastest tree (`calibrate medusa --step-ms`) and the expected speedup
(`simulate medusa`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from vllm_specplug.config import MAX_NUM_SPECULATIVE_TOKENS, resolve_drafter
from vllm_specplug.utils.environment import provenance
from vllm_specplug.utils.step_probe import StepProbe
from vllm_specplug.utils.tables import format_table

from ..eagle2.checkpoint import read_config

#: Tree sizes to measure.
NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 255)
_BASELINE = "plain vLLM (no plugin, no speculation), same run, taking turns"


def measure(
    target: str,
    heads: str,
    nodes: list[int],
    batches: list[int],
    context: int,
    max_tokens: int,
    turns: int,
    **engine: Any,
) -> dict[str, Any]:
    """Medians in milliseconds, by batch: `plain_ms`, `draft_ms` (all heads) and `step_ms` (by rows).

    turns: times that each case is measured; the engines take turns. engine: more arguments of vLLM's `LLM`.

    Raises:
        RuntimeError: an engine has ended, or a case had no step to measure.
    """
    # A step's time depends on the number of its rows, not on the tree's shape; a path of full depth runs all heads.
    depth = read_config(resolve_drafter(heads, "medusa")).get("medusa_num_heads", 1)
    tree = [[0] * level for level in range(1, depth + 1)] + [[rank] for rank in range(1, max(nodes))]
    medusa = {"method": "medusa", "model": heads, "tree": tree[: max(nodes)], "num_speculative_tokens": max(nodes)}
    engine = {"max_num_seqs": max(batches)} | engine
    probes = {"plain": StepProbe(target, None, **engine), "medusa": StepProbe(target, medusa, **engine)}
    cases = [("plain", batch, 0) for batch in batches] + [("medusa", batch, n) for batch in batches for n in nodes]
    seconds: dict[tuple, list[float]] = {case: [] for case in cases}
    drafting: dict[int, list[float]] = {batch: [] for batch in batches}
    try:
        for turn in range(turns + 1):
            for case in cases:
                name, batch, count = case
                request = {"context": context, "max_tokens": max_tokens, "batch": batch}
                found = probes[name].ask(request | ({"nodes": count} if count else {}))
                if turn:  # turn 0 is the warm-up
                    seconds[case] += found["seconds"]
                    drafting[batch] += found["drafting"] if count else []
            print(f"\rturn {turn}/{turns}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
    finally:
        for probe in probes.values():
            probe.close()

    if empty := [case for case, values in seconds.items() if not values]:
        raise RuntimeError(
            f"no full step was measured for (engine, batch, nodes) {empty}: raise --max-tokens or --turns"
        )

    def ms(values: list[float]) -> float:
        return round(1000 * statistics.median(values), 3)

    return {
        "plain_ms": {batch: ms(seconds["plain", batch, 0]) for batch in batches},
        "draft_ms": {batch: ms(drafting[batch]) for batch in batches},
        "step_ms": {batch: {n + 1: ms(seconds["medusa", batch, n]) for n in nodes} for batch in batches},
        "context": context,
        "provenance": provenance(baseline=_BASELINE),
    }


def read_steps(file: Path) -> dict[str, Any]:
    """Read a result of `measure` from a file.

    Raises:
        ValueError: the file is not one of `specplug steps`.
    """
    try:
        found = json.loads(file.read_text())
        tables = {
            "plain_ms": {int(batch): float(ms) for batch, ms in found["plain_ms"].items()},
            "draft_ms": {int(batch): float(ms) for batch, ms in found["draft_ms"].items()},
            "step_ms": {
                int(batch): {int(rows): float(ms) for rows, ms in table.items()}
                for batch, table in found["step_ms"].items()
            },
        }
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{file} is no table of step times ({error!r}): write one with `specplug steps`") from error
    if not tables["step_ms"] or any(set(table) != set(tables["step_ms"]) for table in tables.values()):
        raise ValueError(
            f"{file} has no batches, or not the same for plain steps and trees: write it again with `specplug steps`"
        )
    return found | tables


def interpolate(table: dict[int, float], rows: int) -> float:
    """Interpolate linearly between the points of `table`; beyond its ends, extend the nearest segment."""
    points = sorted(table.items())
    if len(points) == 1:
        return points[0][1]
    (x0, y0), (x1, y1) = next(
        (pair for pair in zip(points, points[1:], strict=False) if rows <= pair[1][0]), points[-2:]
    )
    return y0 + (y1 - y0) * (rows - x0) / (x1 - x0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `specplug steps`."""
    parser.add_argument(
        "--target", metavar="DIR", help="the target (default: SmolLM2-135M-Instruct, prepared if needed)"
    )
    parser.add_argument(
        "--model", metavar="HEADS", default="smollm2-135m-instruct", help="Medusa heads (default: %(default)s)"
    )
    parser.add_argument(
        "--max-nodes", type=int, default=64, metavar="N", help="nodes of the largest tree (default: %(default)s)"
    )
    parser.add_argument(
        "--batches", default="1", metavar="B,...", help="numbers of requests at once, like 1,4 (default: %(default)s)"
    )
    parser.add_argument(
        "--context", metavar="N", type=int, default=200, help="tokens of each prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--max-tokens",
        metavar="N",
        type=int,
        default=24,
        help="tokens decoded in each measurement (default: %(default)s)",
    )
    parser.add_argument(
        "--turns", metavar="N", type=int, default=4, help="measurements of each case (default: %(default)s)"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="JSON file to write")


def run(args: argparse.Namespace) -> None:
    """`specplug steps`; writes the file and prints a table."""
    if not 1 <= args.max_nodes <= MAX_NUM_SPECULATIVE_TOKENS:
        raise ValueError(f"--max-nodes {args.max_nodes} is out of range: choose 1 to {MAX_NUM_SPECULATIVE_TOKENS}")
    try:
        batches = sorted({int(batch) for batch in args.batches.split(",")})
    except ValueError:
        batches = [0]
    if batches[0] < 1 or args.turns < 1:
        raise ValueError("--batches must be numbers from 1, like 1,4,16, and --turns at least 1")
    from vllm_specplug.utils.smollm2 import prepare

    nodes = [n for n in NODES if n <= args.max_nodes]
    found = measure(
        str(args.target or prepare()), args.model, nodes, batches, args.context, args.max_tokens, args.turns
    )
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    rows = [["plain", *(f"{found['plain_ms'][batch]:.2f}" for batch in batches)]]
    rows += [["drafting", *(f"{found['draft_ms'][batch]:.2f}" for batch in batches)]]
    rows += [[f"{n} nodes", *(f"{found['step_ms'][batch][n + 1]:.2f}" for batch in batches)] for n in nodes]
    print(format_table(["step (ms)", *(f"batch {batch}" for batch in batches)], rows))
