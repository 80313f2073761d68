"""Reproduces Medusa's trees at this scale: sparse against dense ones of equal size, and the best size.

    python -m benchmarks.papers.reproduce_medusa --target DIR --model HEADS --answers FILE --features DIR \
        --steps steps.json --out claims.json

The heads rank the tokens of the target's own greedy answers (``specplug data`` writes answers and features).  At
temperature 0 a path of ranks is accepted exactly where each head gives the true token that rank.  One half of the
answers grows the trees, the other half measures them.  ``--steps`` is a file like ``medusa_steps.json``; ``--serve
3,16`` runs sparse trees of those sizes in the real engine on prompts of the second half as well.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.papers.reproductions import Figures, offline_parser, run_script, write
from vllm_specplug.config import resolve_drafter
from vllm_specplug.proposers.medusa.ranks import MeasuredProbabilities, load_for_ranking, rank_answers, simulate_tau
from vllm_specplug.proposers.medusa.sparse_tree import MAX_RANKS, Paths, grow
from vllm_specplug.proposers.training.answers import content_hash, read_answers
from vllm_specplug.proposers.training.features import extract, load_features, target_head

SOURCE = "Medusa (arXiv 2401.10774, {})"
#: Largest sizes of dense trees, and how many random shapes of each are drawn.
DENSE, DRAWS = (8, 16, 32, 64, 128, 255), 20
BUDGETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 255)
PRIOR = 30.0  # as in ``specplug calibrate medusa``


def dense_paths(widths: Sequence[int]) -> Paths:
    """The dense tree in which each node at depth ``k`` has the next head's best ``widths[k]`` guesses as children."""
    paths: list[tuple[int, ...]] = []
    level: list[tuple[int, ...]] = [()]
    for width in widths:
        level = [(*path, rank) for path in level for rank in range(width)]
        paths += level
    return tuple(paths)


def dense_widths(num_heads: int, max_nodes: int, num_ranks: int = MAX_RANKS) -> list[tuple[int, ...]]:
    """Widths of the dense trees of at most ``max_nodes`` nodes whose last level cannot be wider."""
    found: list[tuple[int, ...]] = []

    def extend(widths: tuple[int, ...], level: int, left: int) -> None:
        largest = min(num_ranks, left // level)
        if len(widths) == num_heads or largest == 0:
            found.append(widths)
            return
        for width in range(largest if len(widths) == num_heads - 1 else 1, largest + 1):
            extend((*widths, width), level * width, left - level * width)

    extend((), 1, max_nodes)
    return found


def best_dense(growing: list[torch.Tensor], held_out: list[torch.Tensor], max_nodes: int) -> dict:
    """The dense tree that accepts most on the growing half: its widths by level, its nodes and its held-out tau."""
    rows = torch.cat(growing)

    def accepted(widths: tuple[int, ...]) -> int:
        hits = (rows[:, : len(widths)] >= 0) & (rows[:, : len(widths)] < torch.tensor(widths))
        return int(hits.cumprod(dim=1).sum())

    widths = max(dense_widths(rows.shape[1], max_nodes), key=accepted)
    paths = dense_paths(widths)
    return {"widths": list(widths), "nodes": len(paths), "held_out_tau": round(simulate_tau(held_out, paths), 4)}


def interpolate(table: dict[int, float], rows: int) -> float:
    """Interpolate linearly between the points of `table`; beyond its ends, extend the nearest segment."""
    points = sorted(table.items())
    if len(points) == 1:
        return points[0][1]
    (x0, y0), (x1, y1) = next(
        (pair for pair in zip(points, points[1:], strict=False) if rows <= pair[1][0]), points[-2:]
    )
    return y0 + (y1 - y0) * (rows - x0) / (x1 - x0)


def random_widths(num_heads: int, most: int, draw: random.Random) -> tuple[int, ...]:
    """Draw a random dense tree, as in the paper's figure: widths by level, at least half of ``most`` nodes."""
    while True:
        widths = tuple(draw.randint(1, MAX_RANKS) for _ in range(draw.randint(1, num_heads)))
        if math.prod(widths) <= most and most / 2 <= len(dense_paths(widths)) <= most:
            return widths


def dense_row(growing: list[torch.Tensor], held_out: list[torch.Tensor], sparse: Paths, most: int) -> list:
    """Compare dense trees of at most ``most`` nodes (the best, and random ones) with a sparse one of equal size."""
    best = best_dense(growing, held_out, most)
    draw = random.Random(most)
    shapes = {random_widths(growing[0].shape[1], most, draw) for _ in range(DRAWS)}
    by_chance = [simulate_tau(held_out, dense_paths(widths)) for widths in shapes]
    return [
        best["nodes"],
        simulate_tau(held_out, sparse[: best["nodes"]]),
        best["held_out_tau"],
        " x ".join(map(str, best["widths"])),
        statistics.median(by_chance),
        max(by_chance),
    ]


def served_tau(target: str, model: str, tree: Paths, prompts: list[list[int]], lengths: list[int]) -> float:
    """Measure tau of a static tree in the real engine."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams

    config = {"method": "medusa", "model": model, "tree": [list(path) for path in tree], "budget": "fixed"}
    config["num_speculative_tokens"] = len(tree)
    llm = LLM(
        target,
        dtype="bfloat16",
        max_model_len=2048,
        kv_cache_memory_bytes=1 << 30,
        enforce_eager=True,
        speculative_config=config,
        disable_log_stats=False,
    )
    sampling = [SamplingParams(temperature=0, max_tokens=length) for length in lengths]
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    counters = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    llm.llm_engine.engine_core.shutdown()
    return 1 + counters["vllm:spec_decode_num_accepted_tokens"] / counters["vllm:spec_decode_num_drafts"]


def sparse_against_dense(
    growing: list[torch.Tensor],
    held_out: list[torch.Tensor],
    sparse: Paths,
    figures: Callable[[str, Callable[[], Any]], Any] = lambda name, measure: measure(),
) -> dict:
    """Reproduce figure 4 (left) of the paper."""
    rows = [figures(f"dense {most}", partial(dense_row, growing, held_out, sparse, most)) for most in DENSE]
    sparse_64 = simulate_tau(held_out, sparse[:64])
    ahead = [row[1] > row[2] for row in rows]
    largest = max(rows, key=lambda row: row[0])
    verdict = (
        f"a sparse tree is ahead of the best dense one at {sum(ahead)} of {len(ahead)} sizes, and 64 sparse nodes "
        f"(tau {sparse_64:.3f}) are {'ahead of' if sparse_64 > largest[2] else 'behind'} {largest[0]} dense ones "
        f"({largest[2]:.3f} for the best shape, {largest[4]:.3f} for the median of shapes by chance)."
    )
    return {
        "title": "Sparse against dense trees of equal size",
        "source": SOURCE.format("section 3.3.1, figure 4a"),
        "claim": "an optimised sparse tree of 64 nodes accepts more than a dense one of 256.",
        "verdict": verdict,
        "headers": ["nodes", "sparse tau", "dense tau, best shape", "its widths", "dense by chance, median", "best"],
        "rows": [[f"{cell:.3f}" if isinstance(cell, float) else cell for cell in row] for row in rows],
    }


def read_steps(file: Path) -> dict:
    """Read step times in milliseconds: plain ones and drafting by batch, steps by batch and rows."""
    found = json.loads(file.read_text())
    by_batch = {key: {int(batch): ms for batch, ms in found[key].items()} for key in ("plain_ms", "draft_ms")}
    steps = {int(batch): {int(rows): ms for rows, ms in table.items()} for batch, table in found["step_ms"].items()}
    return by_batch | {"step_ms": steps}


def expected_speedups(taus: dict[int, float], steps: dict, batch: int) -> dict[int, float]:
    """Return tau / overhead (step time / plain step's) by nodes, from tau by nodes (Medusa, section 3.3)."""
    plain, table, drafting = (steps[key][batch] for key in ("plain_ms", "step_ms", "draft_ms"))
    return {nodes: tau * plain / (interpolate(table, nodes + 1) + drafting) for nodes, tau in taus.items()}


def budget_sweep(sparse: Paths, values: list[float], taus: dict[int, float], steps: dict | None) -> dict:
    """Reproduce figures 4 (right) and 21 of the paper; speeds where the step of that size was measured."""
    speeds, overheads = {}, {}
    if steps:
        batch = min(steps["step_ms"])
        measured = {n: tau for n, tau in taus.items() if n + 1 <= max(steps["step_ms"][batch])}
        speeds = expected_speedups(measured, steps, batch)
        overheads = {n: tau / speeds[n] for n, tau in measured.items()}
    slope = statistics.linear_regression(
        [math.log(n) for n in taus], [tau - taus[1] for tau in taus.values()], proportional=True
    )[0]
    verdict = f"tau grows like {taus[1]:.2f} + {slope:.3f} ln(nodes)"
    if speeds:
        best, most = max(speeds, key=speeds.__getitem__), max(speeds)
        verdict += (
            f"; the expected speedup is largest at {best} nodes ({speeds[best]:.3f}x), {speeds[most]:.3f}x at {most}, "
            f"where a step takes {overheads[most]:.2f} times a plain one's time"
        )
    rows = [
        [nodes, f"{1 + sum(values[:nodes]):.3f}", f"{tau:.3f}"]
        + [f"{cells[nodes]:.3f}" if nodes in cells else "-" for cells in (overheads, speeds)]
        for nodes, tau in taus.items()
    ]
    return {
        "title": "The size of the sparse tree",
        "source": SOURCE.format("figures 4b and 21"),
        "claim": "the acceleration rate grows like 0.477 log(candidates), speed only up to about 64 candidates.",
        "verdict": verdict + ".",
        "headers": ["nodes", "tau promised", "tau", "step by plain step", "expected speedup"],
        "rows": rows,
    }


def main() -> None:
    """Run the command (see the module's docstring)."""
    parser = offline_parser(__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, metavar="HEADS", help="Medusa heads: a folder or a shipped name")
    parser.add_argument("--steps", type=Path, metavar="FILE", help="step times, like results/medusa_steps.json")
    parser.add_argument(
        "--serve",
        type=lambda text: [int(n) for n in text.split(",")],
        default=[],
        metavar="N,..",
        help="also serve trees of so many nodes, to check their tau",
    )
    parser.add_argument("--serve-limit", type=int, default=32, help="answers of the second half to serve")
    args = parser.parse_args()

    answers = read_answers(args.answers)
    data = load_features(extract(args.target, answers, args.features, progress=False))
    model = resolve_drafter(args.model, "medusa")
    heads, draft_head, draft_ids = load_for_ranking(model, target_head(args.target)[2])
    inputs = {"target": args.target, "model": model, "answers": content_hash(answers)}
    inputs["serve-limit"] = args.serve_limit
    figures = Figures(args.out, 1 + len(DENSE) + len(args.serve), inputs)

    def all_ranks() -> list:
        return [one.tolist() for one in rank_answers(heads, data, draft_head, draft_ids)]

    ranks = [torch.tensor(one).long().reshape(-1, heads.num_heads) for one in figures("ranks", all_ranks)]
    growing, held_out = ranks[::2], ranks[1::2]
    sparse, values = grow(
        MeasuredProbabilities(torch.cat(growing), PRIOR), growing[0].shape[1], MAX_RANKS, max(BUDGETS)
    )
    taus = {n: simulate_tau(held_out, sparse[:n]) for n in BUDGETS if n <= len(sparse)}
    tables = [
        sparse_against_dense(growing, held_out, sparse, figures),
        budget_sweep(sparse, values, taus, read_steps(args.steps) if args.steps else None),
    ]
    note = f"offline, {len(held_out)} answers measured, {len(growing)} others grew the trees; {ranks[0].shape[1]} heads"
    tables[1]["note"] = f"{note}; promised: by the growing half"
    if args.steps:
        tables[1]["note"] += f"; expected speedups from tau and the measured steps of {args.steps.name}, batch 1"
    checks = []
    for nodes in args.serve:
        chosen = range(1, len(answers), 2)[: args.serve_limit]
        prompts, lengths = [answers[i].prompt_ids for i in chosen], [len(answers[i].answer_ids) for i in chosen]
        offline = simulate_tau([ranks[i] for i in chosen], sparse[:nodes])
        serve = partial(served_tau, args.target, str(model), sparse[:nodes], prompts, lengths)
        served = figures(f"served, {nodes} nodes", serve)
        checks.append(
            {"nodes": nodes, "answers": len(chosen), "offline_tau": round(offline, 3), "served_tau": round(served, 3)}
        )
    for table in tables:
        table.setdefault("note", note)
        for check in checks:
            table["note"] += (
                f"; {check['nodes']} nodes served on {check['answers']} of the prompts: tau {check['served_tau']:.3f}, "
                f"offline {check['offline_tau']:.3f}"
            )
    write(args.out, tables, "dense trees; plain decoding's measured step", checks=checks)


if __name__ == "__main__":
    sys.exit(run_script(main))
