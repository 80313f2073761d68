"""Compares EAGLE heads of one target on the same held-out answers, offline: chains and trees, paired with the first.

    python -m benchmarks.micro.drafters --target DIR --data DATA --out FILE NAME=HEAD [NAME=HEAD ...]

DATA is a folder of `specplug data`. Greedy chains of six tokens give alpha by depth and tau; trees are those that
`eagle2` serves by default, without its floors. A difference is the mean over answers, with its standard error.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from tqdm import tqdm

from vllm_specplug.config import Eagle2Options, resolve_drafter
from vllm_specplug.proposers.eagle2.checkpoint import load_head
from vllm_specplug.proposers.training.comparison import HeldOut, compare
from vllm_specplug.proposers.training.eagle import load_trained
from vllm_specplug.proposers.training.evaluate import chain_acceptance, tau_of
from vllm_specplug.proposers.training.features import FeatureSet, load_features, target_head
from vllm_specplug.proposers.training.precision import autocast, compute_dtype
from vllm_specplug.proposers.training.trees import tree_tau
from vllm_specplug.utils.environment import provenance


@torch.no_grad()
def measure(path: str, data: FeatureSet, embedding: torch.Tensor, lm_head: torch.Tensor) -> tuple[HeldOut, dict]:
    """What a head drafts on the answers, and its row of the result file."""
    head, ids = load_trained(path)
    rows, options = lm_head[ids].to(compute_dtype("cpu")), Eagle2Options(model=path)
    shape = (options.num_speculative_tokens, options.draft_depth, options.draft_top_k)
    with autocast(torch.device("cpu")):
        chain = chain_acceptance(head, data, embedding, rows, ids)
        tree = tree_tau(head, data, embedding, rows, ids, *shape)
    training = load_head(path)[0].get("specplug", {})
    about = {key: training.get(key) for key in ("options", "answer_tokens", "steps", "init_from")}
    row = {"alpha": chain.alphas, "chain_tau": chain.tau, "tree_tau": tau_of(tree), "tree": shape, "training": about}
    return HeldOut(chain.by_answer, tree), row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", required=True, type=Path, help="folder written by `specplug data`")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("heads", nargs="+", metavar="NAME=HEAD")
    args = parser.parse_args()
    _, embedding, lm_head = target_head(args.target)
    data = load_features(sorted((args.data / "features").glob("shard-*.safetensors")))
    found: dict[str, HeldOut] = {}
    rows = {}
    for name, _, path in tqdm([one.partition("=") for one in args.heads], desc="heads"):
        found[name], rows[name] = measure(str(resolve_drafter(path)), data, embedding, lm_head)
        first = next(iter(found))
        differences = compare(found[first], found[name])
        rows[name] |= {f"{kind}_difference": [one.mean, one.error] for kind, one in differences.items()}
        print(f"{name}: chain tau {rows[name]['chain_tau']:.3f}, tree tau {rows[name]['tree_tau']:.3f}", flush=True)
        print("  against the first: " + ", ".join(f"{kind} {one}" for kind, one in differences.items()), flush=True)
        report = {"provenance": provenance(f"{first}, same answers"), "answers": len(data), "heads": rows}
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
