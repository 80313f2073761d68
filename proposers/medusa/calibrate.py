"""`specplug calibrate medusa`: measure the heads on the target's answers and grow a sparse tree for any budget.

One half of the answers grows the tree, the other half measures it: `held_out_tau` is the tau of greedy decoding on the
other half, and `expected_tau` the tau that follows from the values of the grown nodes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from vllm_specplug.config import MAX_NUM_SPECULATIVE_TOKENS, resolve_drafter
from vllm_specplug.utils.figures import new_figure, save
from vllm_specplug.utils.files import replacing
from vllm_specplug.utils.tables import format_table

from ..eagle2.checkpoint import CONFIG_NAME, read_config
from ..training import command
from ..training.features import target_head
from ..training.provenance import provenance
from ..training.trainer import LoopOptions
from .options import DYNAMIC_TOP_K
from .ranks import MeasuredProbabilities, load_for_ranking, rank_answers, simulate_dynamic_tau, simulate_tau
from .sparse_tree import MAX_RANKS, TREE_KEY, dense_paths, dense_widths, grow

#: Nodes of the dense trees that the sparse tree is compared with (Medusa, figure 6).
DENSE = (64, 256)

#: Nodes of the dynamic trees that the sparse tree is compared with.
DYNAMIC = (4, 8, 16, 64)

#: Tree sizes whose tau is measured on the held-out half.
BUDGETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 255)


def calibrate(ranks: list[torch.Tensor], budget: int, prior: float, step_ms: dict[int, float] | None = None) -> dict:
    """Grow a tree from `ranks` (of `rank_answers`, one tensor per answer) and measure it.

    budget, prior: as in `grow` and `MeasuredProbabilities`. step_ms: milliseconds of a step by its number of rows
    (drafted nodes + 1); if given, the tree is cut to the size with the most tokens per second on the held-out half.

    Returns `medusa_choices` (the paths in order of growth), `expected_tau` (of the first n nodes, n = 1..),
    `held_out_tau` and `tokens_per_s` (by nodes), `dense` (the best dense trees of up to `DENSE` nodes and their
    held-out tau), `accuracies` (the first ten a_k(i) of each head).
    """
    if len(ranks) < 2:
        raise ValueError(f"calibration needs at least 2 answers to grow a tree and to measure it, got {len(ranks)}")
    growing, held_out = ranks[::2], ranks[1::2]
    probabilities = MeasuredProbabilities(torch.cat(growing), prior)
    paths, values = grow(probabilities, growing[0].shape[1], MAX_RANKS, budget)
    expected = (1 + torch.tensor(values).cumsum(0)).tolist()
    budgets = sorted({n for n in BUDGETS if n < len(paths)} | {len(paths)})
    taus = {n: simulate_tau(held_out, paths[:n]) for n in budgets}
    result = {
        TREE_KEY: [list(path) for path in paths],
        "expected_tau": [round(tau, 4) for tau in expected],
        "held_out_tau": {str(n): round(tau, 4) for n, tau in taus.items()},
        "dense": [best_dense(growing, held_out, nodes) for nodes in DENSE],
        "accuracies": [[round(value, 4) for value in row[:10]] for row in probabilities.accuracies],
    }
    if step_ms:
        speeds = {n: 1000 * tau / interpolate(step_ms, n + 1) for n, tau in taus.items()}
        best = max(speeds, key=speeds.__getitem__)
        result["tokens_per_s"] = {str(n): round(speed, 2) for n, speed in speeds.items()}
        result[TREE_KEY] = result[TREE_KEY][:best]
    return result


def best_dense(growing: list[torch.Tensor], held_out: list[torch.Tensor], max_nodes: int) -> dict:
    """The dense tree that accepts most on the growing half: its widths by level, its nodes and its held-out tau."""
    rows = torch.cat(growing)

    def accepted(widths: tuple[int, ...]) -> int:
        hits = (rows[:, : len(widths)] >= 0) & (rows[:, : len(widths)] < torch.tensor(widths))
        return int(hits.cumprod(dim=1).sum())

    widths = max(dense_widths(rows.shape[1], max_nodes), key=accepted)
    paths = dense_paths(widths)
    return {"widths": list(widths), "nodes": len(paths), "held_out_tau": round(simulate_tau(held_out, paths), 4)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `specplug calibrate medusa`."""
    command.add_data_arguments(parser, training=False)
    parser.add_argument(
        "--model",
        metavar="HEADS",
        required=True,
        help="the heads: a directory, a Hugging Face repository or a short name",
    )
    parser.add_argument(
        "--budget", metavar="N", type=int, default=64, help="largest number of nodes of the tree (default: %(default)s)"
    )
    parser.add_argument(
        "--prior",
        type=float,
        default=30.0,
        metavar="POSITIONS",
        help="positions with a head's overall accuracy that are added to the counts of each path, because rare paths "
        "have few (default: %(default)s)",
    )
    parser.add_argument(
        "--step-ms",
        type=parse_step_ms,
        metavar="ROWS=MS,...",
        help="time of a step by rows, drafting included, for example from `specplug calibrate cost`; cuts the tree to "
        "the size with the most tokens per second",
    )
    parser.add_argument(
        "--into-model",
        action="store_true",
        help="also write the tree into config.json of the heads, which then draft with it",
    )


def run(args: argparse.Namespace) -> int:
    """`specplug calibrate medusa`; writes OUT/tree.json and OUT/tree.png."""
    if not 1 <= args.budget <= MAX_NUM_SPECULATIVE_TOKENS:
        raise ValueError(f"--budget {args.budget} is out of range: choose 1 to {MAX_NUM_SPECULATIVE_TOKENS}")
    if not args.prior >= 0:
        raise ValueError(f"--prior {args.prior} must not be negative")
    model = resolve_drafter(args.model, "medusa")
    heads, draft_head, draft_ids = load_for_ranking(model, target_head(args.target)[2])
    with command.training(args, LoopOptions()) as (_, material):
        ranks = rank_answers(heads, material.data, draft_head, draft_ids)
    result = calibrate(ranks, args.budget, args.prior, args.step_ms)
    held_out, top_k = range(1, len(ranks), 2), min(DYNAMIC_TOP_K, draft_ids.numel())
    result["dynamic_tau"] = {
        nodes: round(simulate_dynamic_tau(heads, material.data, draft_head, draft_ids, held_out, int(nodes), top_k), 4)
        for nodes in result["held_out_tau"]
        if int(nodes) in DYNAMIC
    }
    result["specplug"] = provenance(args.target, **material.facts, model=model.name, prior=args.prior)
    out = Path(args.out)
    write_json(out / "tree.json", result)
    if args.into_model:
        write_json(model / CONFIG_NAME, read_config(model) | {TREE_KEY: result[TREE_KEY]})
    plot(result, out / "tree.png")
    print(report(result))
    print(f"{len(result[TREE_KEY])} nodes: {out / 'tree.json'}")
    return 0


def parse_step_ms(text: str) -> dict[int, float]:
    """`1=20.6,32=25.7` -> {1: 20.6, 32: 25.7}."""
    table = {int(rows): float(ms) for rows, _, ms in (entry.partition("=") for entry in text.split(","))}
    if min(table) < 1 or min(table.values()) <= 0:
        raise ValueError("rows and milliseconds are positive")
    return dict(sorted(table.items()))


def interpolate(table: dict[int, float], rows: int) -> float:
    """Interpolate linearly between the points of `table`; beyond its ends, extend the nearest segment."""
    points = sorted(table.items())
    if len(points) == 1:
        return points[0][1]
    (x0, y0), (x1, y1) = next(
        (pair for pair in zip(points, points[1:], strict=False) if rows <= pair[1][0]), points[-2:]
    )
    return y0 + (y1 - y0) * (rows - x0) / (x1 - x0)


def report(result: dict) -> str:
    """Format two tables: tau by tree, and the accuracies by rank."""
    speeds = result.get("tokens_per_s", {})
    rows = [
        [budget, f"{result['expected_tau'][int(budget) - 1]:.3f}", f"{tau:.3f}"]
        + ([f"{speeds[budget]:.1f}"] if speeds else [])
        for budget, tau in result["held_out_tau"].items()
    ]
    rows += [
        [f"{nodes} dynamic", "-", f"{tau:.3f}"] + (["-"] if speeds else [])
        for nodes, tau in result.get("dynamic_tau", {}).items()
    ]
    rows += [
        [f"{dense['nodes']} dense ({' x '.join(map(str, dense['widths']))})", "-", f"{dense['held_out_tau']:.3f}"]
        + (["-"] if speeds else [])
        for dense in result["dense"]
    ]
    ranks = range(1, 1 + len(result["accuracies"][0]))
    by_rank = [[f"head {k}", *(f"{a:.3f}" for a in row)] for k, row in enumerate(result["accuracies"], start=1)]
    return "\n\n".join(
        [
            format_table(["nodes", "expected tau", "held-out tau"] + (["tokens/s"] if speeds else []), rows),
            format_table(["accuracy by rank", *map(str, ranks)], by_rank),
        ]
    )


def plot(result: dict, file: Path) -> None:
    """Draw tau by nodes, and the accuracies by rank."""
    figure = new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    expected, held_out = result["expected_tau"], result["held_out_tau"]
    left.plot(range(1, len(expected) + 1), expected, label="expected")
    left.plot([int(n) for n in held_out], list(held_out.values()), "o", label="held-out answers")
    dense = result["dense"]
    left.plot([tree["nodes"] for tree in dense], [tree["held_out_tau"] for tree in dense], "x", label="dense trees")
    if "tokens_per_s" in result:
        speed = left.twinx()
        speed.plot([int(n) for n in result["tokens_per_s"]], list(result["tokens_per_s"].values()), "k:")
        speed.set_ylabel("tokens/s (dotted)")
        left.axvline(len(result[TREE_KEY]), color="grey", linewidth=0.8)
    left.set(xlabel="nodes", ylabel="tau (bonus token counted)", title="Sparse tree grown greedily")
    left.legend()
    for head, row in enumerate(result["accuracies"], start=1):
        right.plot(range(1, len(row) + 1), row, "o-", label=f"head {head}")
    right.set(xlabel="rank of the guess", ylabel="accuracy", title="Accuracy of each head's guesses", yscale="log")
    right.legend()
    save(figure, file)


def write_json(file: Path, value: dict) -> None:
    """Write atomically, with one line for each key."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items()]
    with replacing(file) as temporary:
        temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n")
