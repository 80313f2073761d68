"""HASS's alignment at this scale: heads aligned over 1, 2, 3 ... steps, equal data, equal steps, from one common head.

    python benchmarks/reproduce_hass.py --target DIR --data DATA --dev-data DEV --heads DIR --out claims.json

``specplug data`` makes both data folders.  The common head is trained without alignment first (``--base-epochs``), then
every head goes on from it (``--epochs``); heads that are in ``--heads`` already are not trained again.  tau is that of
EAGLE-2 trees along the target's own greedy answers: at temperature 0 a drafted token is accepted exactly when it is the
answer's next.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from vllm_specplug.proposers.training import eagle, evaluate
from vllm_specplug.proposers.training.answers import read_answers
from vllm_specplug.proposers.training.data import ANSWERS_NAME, FEATURES_NAME
from vllm_specplug.proposers.training.features import extract, load_features, target_head

from vllm_specplug.environment import provenance
from vllm_specplug.files import replacing

NODES, DEPTH, BEAM = 60, 6, 10
CLAIM = "acceptance falls less from step to step, and tau grows, up to align-3; align-4 is about equal."


def train(args: argparse.Namespace, out: Path, *options: str) -> Path:
    """The head in ``out``, trained if it is not there."""
    if not (out / "model.safetensors").is_file():
        command = [sys.executable, "-m", "vllm_specplug.cli", "train", "hass", "--target", args.target]
        command += ["--data", str(args.data), "--out", str(out), *options]
        subprocess.run(command + (["--threads", str(args.threads)] if args.threads else []), check=True)
    return out


def trained(args: argparse.Namespace) -> dict[int, Path]:
    """The heads by alignment."""
    base = train(args, args.heads / "base", "--align-steps", "1", "--epochs", str(args.base_epochs), "--lr", "1e-3")
    more = ["--init-from", str(base), "--epochs", str(args.epochs), "--lr", "6e-4", "--seed", "1"]
    return {k: train(args, args.heads / f"align-{k}", "--align-steps", str(k), *more) for k in args.align}


def tau(pairs: Iterable[tuple[int, int]]) -> float:
    """Tokens by cycles."""
    tokens, cycles = map(sum, zip(*pairs, strict=True))
    return tokens / cycles


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    for name in ("data", "dev-data", "heads", "out"):
        parser.add_argument(f"--{name}", required=True, type=Path)
    parser.add_argument("--align", type=lambda text: [int(k) for k in text.split(",")], default=[1, 2, 3, 4])
    parser.add_argument("--base-epochs", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if 1 not in args.align:
        parser.error("--align must name 1, which the others are compared with")

    heads = trained(args)
    answers = read_answers(args.dev_data / ANSWERS_NAME)
    data = load_features(extract(args.target, answers, args.dev_data / FEATURES_NAME, progress=False))
    _, embedding, lm_head = target_head(args.target)
    figures = {}
    for steps, folder in heads.items():
        head, ids = eagle.load_trained(folder)
        head, rows = head.to(torch.bfloat16), (embedding, lm_head[ids].to(torch.bfloat16).contiguous(), ids)
        chain = evaluate.chain_acceptance(head, data, *rows, depth=DEPTH)
        tree = evaluate.tree_tau(head, data, *rows, nodes=NODES, depth=DEPTH, beam=BEAM)
        figures[steps] = {"alphas": chain.alphas, "chain": chain.tau, "tree": tau(tree)}
    first = figures[1]["tree"]
    facts = json.loads((heads[1] / "config.json").read_text())["specplug"]
    table = {
        "title": "Harmonized context alignment: steps of alignment, equal data and equal training steps",
        "source": "HASS (arXiv 2408.15766)",
        "claim": CLAIM,
        "verdict": ", ".join(f"align-{k}: {f['tree'] / first:.3f}x align-1" for k, f in figures.items() if k > 1) + ".",
        "headers": [
            "alignment",
            *(f"{level}-alpha" for level in range(DEPTH)),
            "chain tau",
            "tree tau",
            "over align-1",
        ],
        "rows": [
            [
                f"align-{k}",
                *(round(alpha, 3) for alpha in f["alphas"]),
                *(round(f[name], 3) for name in ("chain", "tree")),
                f"{f['tree'] / first:.3f}x",
            ]
            for k, f in figures.items()
        ],
        "note": f"offline, {len(data)} held-out answers; trees of {NODES} nodes, depth {DEPTH}, {BEAM} children; "
        f"{facts['steps']} steps on {facts['answer_tokens']} answer tokens after a common start without alignment",
    }
    result = {"reproductions": [table], "provenance": provenance(baseline="align-1, same data, same steps")}
    with replacing(args.out) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["reproductions"], indent=1))


if __name__ == "__main__":
    main()
