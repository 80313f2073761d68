"""Reproduces HASS at this scale: alignment over 1, 2, 3 ... steps, K and w of its loss; equal data, steps and start.

    python -m benchmarks.papers.reproduce_hass --target DIR --data DATA --dev-data DEV --heads DIR --out claims.json \
        [--start-from HEAD] [--sweep-data DATA]

``specplug data`` writes the data folders.  The common head is given (``--start-from``) or trained first without
alignment (``--base-epochs``); then training of every head continues from it (``--epochs``).  Heads that are in
``--heads`` already are not trained again.  With ``--sweep-data``, usually less of the same data, heads aligned over
three steps continue from the common head with each K and w.  tau is that of EAGLE-2 trees along the
target's own greedy answers: at temperature 0 a drafted token is accepted exactly when it is the answer's next.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.papers.reproductions import Cycles, Figures, gain_text, run_script, tau, verdict_on, write
from vllm_specplug.proposers.training import eagle, evaluate
from vllm_specplug.proposers.training.answers import content_hash, read_answers
from vllm_specplug.proposers.training.data import ANSWERS_NAME, FEATURES_NAME
from vllm_specplug.proposers.training.features import extract, load_features, target_head
from vllm_specplug.proposers.training.trees import tree_tau

NODES, DEPTH, BEAM = 60, 6, 10
SWEEP_NODES, SWEEP_DEPTH, SWEEP_BEAM = 16, 4, 4
SOURCE = "HASS (arXiv 2408.15766, {})"
#: The paper's tau by steps of alignment (table 4) and by K and w (table 7): LLaMA2-Chat 7B, T = 0, mean of three tasks.
ALIGNED = {1: 4.78, 2: 5.11, 3: 5.15, 4: 5.16, 5: 5.11}
SWEEP = {
    (10, 0.0): 5.09,
    (10, 0.1): 5.13,
    (10, 0.2): 5.14,
    (10, 0.5): 5.17,
    (10, 1.0): 5.15,
    (10, 2.0): 5.15,
    (1, 1.0): 5.08,
    (5, 1.0): 5.16,
    (50, 1.0): 5.16,
    (100, 1.0): 5.16,
}


def train(args: argparse.Namespace, data: Path, out: Path, *options: str) -> Path:
    """Return the head in ``out``; train it if it is not there."""
    if not (out / "model.safetensors").is_file():
        command = [sys.executable, "-m", "vllm_specplug.cli.cli", "train", "hass", "--target", args.target]
        command += ["--data", str(data), "--out", str(out), *options]
        subprocess.run(command + (["--threads", str(args.threads)] if args.threads else []), check=True)
    return out


def start(args: argparse.Namespace) -> Path:
    """Return the head from which all others continue."""
    if args.start_from:
        return args.start_from
    return train(args, args.data, args.heads / "base", *aligned_over(1), "--epochs", str(args.base_epochs), *rate(1e-3))


def aligned(args: argparse.Namespace) -> dict[int, Path]:
    """Return the heads by alignment."""
    more = ["--init-from", str(start(args)), "--epochs", str(args.epochs), *rate(args.lr), "--seed", "1"]
    return {k: train(args, args.data, args.heads / f"align-{k}", *aligned_over(k), *more) for k in args.align}


def swept(args: argparse.Namespace) -> dict[tuple[int, float], Path]:
    """Return the heads by K and w, trained on the data of the sweep in small batches."""
    more = ["--init-from", str(start(args)), "--epochs", "1", "--batch-tokens", "1024", *rate(args.lr / 2)]
    more += [*aligned_over(3), "--seed", "1"]
    return {
        (k, w): train(
            args,
            args.sweep_data,
            args.heads / f"top-{k}-weight-{w}",
            *("--topk", str(k), "--distill-weight", str(w)),
            *more,
        )
        for k, w in args.sweep
    }


def aligned_over(steps: int) -> list[str]:
    """Option of the training command."""
    return ["--align-steps", str(steps)]


def rate(value: float) -> list[str]:
    """Option of the training command."""
    return ["--lr", str(value)]


class Judge:
    """Measures heads on held-out answers."""

    def __init__(self, args: argparse.Namespace, total: int):
        target, folder, self.start = args.target, args.dev_data, start(args)
        answers = read_answers(folder / ANSWERS_NAME)
        inputs = {name: value for name, value in vars(args).items() if name not in ("out", "align", "sweep", "threads")}
        self.figures = Figures(args.out, total, inputs | {"dev_data": content_hash(answers)})
        self.data = load_features(extract(target, answers, folder / FEATURES_NAME, progress=False))
        _, self.embedding, self.lm_head = target_head(target)

    def _load(self, folder: Path) -> tuple:
        head, ids = eagle.load_trained(folder)
        return (
            head.to(torch.bfloat16),
            self.data,
            self.embedding,
            self.lm_head[ids].to(torch.bfloat16).contiguous(),
            ids,
        )

    def chain(self, folder: Path) -> evaluate.Acceptance:
        """Measure the acceptance of chains."""

        def measure() -> dict:
            return asdict(evaluate.chain_acceptance(*self._load(folder), depth=DEPTH))

        return evaluate.Acceptance(**self.figures(f"chains of {folder.name}", measure))

    def tree(self, folder: Path, nodes: int = NODES, depth: int = DEPTH, beam: int = BEAM) -> Cycles:
        """Count tokens and cycles of EAGLE-2 trees."""

        def measure() -> Cycles:
            return tree_tau(*self._load(folder), nodes=nodes, depth=depth, beam=beam)

        return self.figures(f"trees of {folder.name}, {nodes} nodes", measure)


def facts_of(folder: Path, start: Path) -> str:
    """Describe what a head was trained on."""
    facts, common = (json.loads((f / "config.json").read_text())["specplug"] for f in (folder, start))
    return (
        f"{facts['steps']} steps on {facts['answer_tokens']} answer tokens after a common start: "
        f"{common['steps']} steps aligned over {common['options']['align_steps']} "
        f"on {common['answer_tokens']} answer tokens"
    )


def alignment_table(judge: Judge, heads: dict[int, Path]) -> dict:
    """Reproduce table 4 and figure 5 of the paper."""
    chains = {k: judge.chain(folder) for k, folder in heads.items()}
    trees = {k: judge.tree(folder) for k, folder in heads.items()}
    verdicts = [f"align-{k} over align-1: {verdict_on(trees[k], trees[1])}" for k in heads if k > 1]
    if 3 in heads:
        later = [k for k in heads if k > 3]
        verdicts += [f"align-3 over align-{k}: {verdict_on(trees[3], trees[k])}" for k in later]
    return {
        "title": "Harmonized context alignment: steps of alignment",
        "source": SOURCE.format("table 4 and figure 5, LLaMA2-Chat 7B"),
        "claim": "acceptance falls less from step to step, and tau grows up to align-3; align-4 is equal, 5 is worse.",
        "verdict": "; ".join(verdicts) + ".",
        "headers": [
            "alignment",
            *(f"{level}-alpha" for level in range(DEPTH)),
            "chain tau",
            "tree tau",
            "over align-1 (95%)",
            "paper's tau",
            "over align-1",
        ],
        "rows": [
            [
                f"align-{k}",
                *(f"{alpha:.3f}" for alpha in chains[k].alphas),
                f"{chains[k].tau:.3f}",
                f"{tau(trees[k]):.3f}",
                gain_text(trees[k], trees[1]) if k > 1 else "-",
                f"{ALIGNED[k]:.2f}" if k in ALIGNED else "-",
                f"{ALIGNED[k] / ALIGNED[1]:.3f}x" if k in ALIGNED and k > 1 else "-",
            ]
            for k in heads
        ],
        "note": f"offline, {len(judge.data)} held-out answers; trees of {NODES} nodes, depth {DEPTH}, {BEAM} children; "
        + facts_of(heads[1], judge.start),
    }


def sweep_table(judge: Judge, heads: dict[tuple[int, float], Path]) -> dict:
    """Reproduce table 7 and figure 4 of the paper."""
    trees = {key: judge.tree(folder, SWEEP_NODES, SWEEP_DEPTH, SWEEP_BEAM) for key, folder in heads.items()}
    none = trees[10, 0.0]
    best = max(trees, key=lambda key: tau(trees[key]))
    held = {key: verdict_on(found, none) for key, found in trees.items() if key[1]}
    ahead = sum(verdict == "holds" for verdict in held.values())
    unclear = sum(verdict == "cannot be told" for verdict in held.values())
    return {
        "title": "K and w of the top-K loss",
        "source": SOURCE.format("section 4.2.2, figure 4 and table 7, LLaMA2-Chat 7B"),
        "claim": "the loss helps at any weight, most at 0.5; K = 1 loses, 5 to 100 are close.",
        "verdict": f"of {len(held)} heads with the loss, {ahead} are ahead of the one without, {unclear} cannot be "
        f"told from it; the best is K = {best[0]}, w = {best[1]}.",
        "headers": ["K", "w", "tree tau", "over w = 0 (95%)", "paper's tau", "over w = 0"],
        "rows": [
            [
                k,
                w,
                f"{tau(found):.3f}",
                gain_text(found, none) if w else "-",
                f"{SWEEP[k, w]:.2f}",
                f"{SWEEP[k, w] / SWEEP[10, 0.0]:.3f}x" if w else "-",
            ]
            for (k, w), found in trees.items()
        ],
        "note": f"offline, {len(judge.data)} held-out answers; trees of {SWEEP_NODES} nodes, depth {SWEEP_DEPTH}, "
        f"{SWEEP_BEAM} children; align-3, {facts_of(next(iter(heads.values())), judge.start)}",
    }


def parse_sweep(text: str) -> list[tuple[int, float]]:
    """Parse ``10:0,10:1`` to pairs of K and w that the paper has, w = 0 included."""
    pairs = [(int(k), float(w)) for k, _, w in (entry.partition(":") for entry in text.split(","))]
    if (10, 0.0) not in pairs or not set(pairs) <= set(SWEEP):
        raise argparse.ArgumentTypeError(f"choose pairs K:w of the paper's table 7, 10:0 among them, not {text!r}")
    return pairs


def main() -> None:
    """Run the command (see the module's docstring)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, metavar="DIR", help="Hugging Face folder of the target")
    parser.add_argument("--data", required=True, type=Path, metavar="DIR", help="folder of `specplug data`: training")
    parser.add_argument("--dev-data", required=True, type=Path, metavar="DIR", help="the same: held-out answers")
    parser.add_argument("--heads", required=True, type=Path, metavar="DIR", help="folder for the trained heads")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="JSON file to write")
    parser.add_argument(
        "--align",
        type=lambda text: [int(k) for k in text.split(",")],
        default=[1, 2, 3, 4, 5],
        metavar="N,..",
        help="alignment steps to compare (default: 1,2,3,4,5)",
    )
    parser.add_argument("--start-from", type=Path, metavar="HEAD", help="common start (default: trained, unaligned)")
    parser.add_argument("--base-epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=6e-4, help="of the alignment; the sweep's is half of it")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--sweep-data", type=Path, help="folder for the sweep over K and w (default: no sweep)")
    parser.add_argument("--sweep", type=parse_sweep, default=list(SWEEP), metavar="K:w,..")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if 1 not in args.align:
        parser.error("--align must name 1, which the others are compared with")

    heads = aligned(args)
    sweep = swept(args) if args.sweep_data else {}
    judge = Judge(args, 2 * len(heads) + len(sweep))
    tables = [alignment_table(judge, heads), *([sweep_table(judge, sweep)] if sweep else [])]
    write(args.out, tables, "align-1 and the loss without its top-K term: same data, same steps")


if __name__ == "__main__":
    sys.exit(run_script(main))
