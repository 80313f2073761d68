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
from vllm_specplug.utils.files import replacing
from vllm_specplug.utils.tables import format_table

from ..eagle2.checkpoint import CONFIG_NAME, read_config
from ..training import command
from ..training.features import target_head
from ..training.provenance import provenance
from ..training.trainer import LoopOptions
from .ranks import MeasuredProbabilities, load_for_ranking, rank_answers, simulate_tau
from .sparse_tree import MAX_RANKS, TREE_KEY, grow

#: Tree sizes whose tau is measured on the held-out half.
BUDGETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 255)


def calibrate(ranks: list[torch.Tensor], budget: int, prior: float) -> dict:
    """Grow a tree from `ranks` (of `rank_answers`, one tensor per answer) and measure it.

    budget, prior: as in `grow` and `MeasuredProbabilities`.

    Returns `medusa_choices` (the paths in order of growth), `expected_tau` (of the first n nodes, n = 1..),
    `held_out_tau` (by nodes), `accuracies` (the first ten a_k(i) of each head).
    """
    if len(ranks) < 2:
        raise ValueError(f"calibration needs at least 2 answers to grow a tree and to measure it, got {len(ranks)}")
    growing, held_out = ranks[::2], ranks[1::2]
    probabilities = MeasuredProbabilities(torch.cat(growing), prior)
    paths, values = grow(probabilities, growing[0].shape[1], MAX_RANKS, budget)
    expected = (1 + torch.tensor(values).cumsum(0)).tolist()
    budgets = sorted({n for n in BUDGETS if n < len(paths)} | {len(paths)})
    taus = {n: simulate_tau(held_out, paths[:n]) for n in budgets}
    return {
        TREE_KEY: [list(path) for path in paths],
        "expected_tau": [round(tau, 4) for tau in expected],
        "held_out_tau": {str(n): round(tau, 4) for n, tau in taus.items()},
        "accuracies": [[round(value, 4) for value in row[:10]] for row in probabilities.accuracies],
    }


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
        "--into-model",
        action="store_true",
        help="also write the tree into config.json of the heads, which then draft with it",
    )


def run(args: argparse.Namespace) -> int:
    """`specplug calibrate medusa`; writes OUT/tree.json."""
    if not 1 <= args.budget <= MAX_NUM_SPECULATIVE_TOKENS:
        raise ValueError(f"--budget {args.budget} is out of range: choose 1 to {MAX_NUM_SPECULATIVE_TOKENS}")
    if not args.prior >= 0:
        raise ValueError(f"--prior {args.prior} must not be negative")
    model = resolve_drafter(args.model, "medusa")
    heads, draft_head, draft_ids = load_for_ranking(model, target_head(args.target)[2])
    with command.training(args, LoopOptions()) as (_, material):
        ranks = rank_answers(heads, material.data, draft_head, draft_ids)
    result = calibrate(ranks, args.budget, args.prior)
    result["specplug"] = provenance(args.target, **material.facts, model=model.name, prior=args.prior)
    out = Path(args.out)
    write_json(out / "tree.json", result)
    if args.into_model:
        write_json(model / CONFIG_NAME, read_config(model) | {TREE_KEY: result[TREE_KEY]})
    print(report(result))
    print(f"{len(result[TREE_KEY])} nodes: {out / 'tree.json'}")
    return 0


def report(result: dict) -> str:
    """Format two tables: tau by tree, and the accuracies by rank."""
    rows = [
        [nodes, f"{result['expected_tau'][int(nodes) - 1]:.3f}", f"{tau:.3f}"]
        for nodes, tau in result["held_out_tau"].items()
    ]
    ranks = range(1, 1 + len(result["accuracies"][0]))
    by_rank = [[f"head {k}", *(f"{a:.3f}" for a in row)] for k, row in enumerate(result["accuracies"], start=1)]
    return "\n\n".join(
        [
            format_table(["nodes", "expected tau", "held-out tau"], rows),
            format_table(["accuracy by rank", *map(str, ranks)], by_rank),
        ]
    )


def write_json(file: Path, value: dict) -> None:
    """Write atomically, with one line for each key."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items()]
    with replacing(file) as temporary:
        temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n")
