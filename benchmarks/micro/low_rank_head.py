"""Measures what a draft head of low rank drafts: each row of the LM head as a combination of a few vectors (offline).

    python -m benchmarks.micro.low_rank_head --target DIR --data DATA --head HEAD --ranks 384,288,192 --out FILE

DATA is a folder of `specplug data`.  The factors are those of least squared error of the logits on the very answers on
which greedy chains are then measured, which favours them; they are not trained further.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from tqdm import tqdm

from vllm_specplug.config import resolve_drafter
from vllm_specplug.proposers.training.eagle import load_trained
from vllm_specplug.proposers.training.evaluate import chain_acceptance
from vllm_specplug.proposers.training.features import load_features, target_head
from vllm_specplug.proposers.training.precision import autocast, compute_dtype
from vllm_specplug.utils.environment import provenance


def low_rank(rows: torch.Tensor, features: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the matrix of this rank whose logits of the features have the least squared error.

    Args:
        rows: ``[draft_vocab, hidden_size]``, of the LM head.
        features: ``[tokens, hidden_size]``.
        rank: at most ``hidden_size``.
    """
    features = features.double()
    values, vectors = torch.linalg.eigh(features.T @ features / len(features))
    spread = values.clamp(min=values.max() * 1e-9).sqrt()
    left, sizes, right = torch.linalg.svd(rows.double() @ vectors * spread, full_matrices=False)
    return (left[:, :rank] * sizes[:rank] @ right[:rank] / spread @ vectors.T).to(rows.dtype)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", required=True, type=Path, help="folder written by `specplug data`")
    parser.add_argument("--head", required=True)
    parser.add_argument("--ranks", required=True, help="numbers with commas between")
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    _, embedding, lm_head = target_head(args.target)
    data = load_features(sorted((args.data / "features").glob("shard-*.safetensors")))
    head, ids = load_trained(str(resolve_drafter(args.head)))
    rows = lm_head[ids].to(compute_dtype("cpu"))
    found = {}
    for rank in tqdm([rows.shape[1], *map(int, args.ranks.split(","))], desc="ranks"):
        factors = rows if rank == rows.shape[1] else low_rank(rows.float(), data.features, rank).to(rows.dtype)
        with autocast(torch.device("cpu")):
            chain = chain_acceptance(head, data, embedding, factors, ids)
        found[rank] = {"alpha": chain.alphas, "chain_tau": chain.tau}
        print(f"rank {rank}: chain tau {chain.tau:.3f}", flush=True)
        report = {"provenance": provenance("the whole rank, same answers"), "answers": len(data), "ranks": found}
        args.out.write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
