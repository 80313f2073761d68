"""Multi-round rejection over a tree whose drafts were sampled (SpecInfer; PAPERS.md section 1).

At an accepted node the siblings are tried in the order of their draw: token x is accepted with probability
min(1, p(x) / q(x)); where it is not, p becomes norm(max(0, p - q)), and q loses x and is renormalised, for the siblings
were drawn without replacement.  Where all are rejected, the token comes from what is left of p.  What is emitted
follows p exactly, if each sibling is kept whatever its token is (``draft_sampling.round_values``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_specplug.types import PADDING, Proposal, TokenTree

#: ``target_probs(rows [num_reqs]) -> float32 [num_reqs, vocab]``: the target's distribution behind one row each.
TargetProbs = Callable[[torch.Tensor], torch.Tensor]


def accept_rejection(
    tree: TokenTree,
    proposal: Proposal,
    target_probs: TargetProbs,
    uniform: torch.Tensor,
    active: torch.Tensor,
    max_depth: int,
) -> torch.Tensor:
    """Walk the trees.

    Args:
        tree: the verified trees.
        proposal: the distributions that the nodes were drawn from.
        target_probs: the target.
        uniform: float64 ``[num_reqs, max_depth, max_children + 1]`` from 0 to 1; the last of each depth draws from what
            is left of p.
        active: bool ``[num_reqs]``; the others emit nothing.
        max_depth: of the trees.

    Returns:
        int64 ``[num_reqs, max_depth]``; the accepted path and, where the siblings behind it were all rejected, the
        token from what was left of p; ``PADDING`` behind.  Behind a path that ends in a leaf a token is still to be
        sampled from the leaf's row.
    """
    num_reqs = len(active)
    token_ids = tree.token_ids.new_full((num_reqs, max_depth), PADDING)
    rows = torch.zeros_like(tree.num_rows)
    sync_is_cheap = rows.device.type == "cpu"
    for depth in range(max_depth):
        if sync_is_cheap and not active.any():
            break
        left = target_probs(rows)
        is_child = (tree.parents == rows.unsqueeze(1)) & (tree.token_ids >= 0) & active.unsqueeze(1)
        rank = is_child.cumsum(dim=1)
        trying = is_child.any(dim=1)  # a leaf's token is drawn by the host's sampler
        active = torch.zeros_like(active)
        drawn_from = _at(proposal.index, is_child.long().argmax(dim=1))
        candidates = _at(proposal.token_ids, drawn_from)
        q = _at(proposal.probs, drawn_from)
        for round_ in range(uniform.shape[2] - 1):
            found, child = (is_child & (rank == round_ + 1)).max(dim=1)
            tried = trying & found
            if sync_is_cheap and not tried.any():
                break
            token = _at(tree.token_ids, child).clamp(min=0)
            is_token = candidates == token.unsqueeze(1)
            draft_prob = (q * is_token).sum(dim=1)
            accepted = tried & (uniform[:, depth, round_] * draft_prob < _at(left, token))
            rejected = tried & ~accepted
            token_ids[:, depth] = torch.where(accepted, token, token_ids[:, depth])
            rows, active, trying = torch.where(accepted, child, rows), active | accepted, trying & ~accepted
            less = (left.gather(1, candidates) - q).clamp(min=0)
            left = torch.where(rejected.unsqueeze(1), _normalised(left.scatter(1, candidates, less), left), left)
            q = torch.where(rejected.unsqueeze(1), _normalised(q.masked_fill(is_token, 0), q), q)
        rest = _draw(left, uniform[:, depth, -1])
        token_ids[:, depth] = torch.where(trying, rest, token_ids[:, depth])
    return token_ids


def _at(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``values [R, n, ...]`` at ``index [R]`` -> ``[R, ...]``."""
    return values[torch.arange(len(index), device=index.device), index]


def _normalised(values: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """To a sum of 1; where nothing is left (rounding: p equals q), ``otherwise``."""
    total = values.sum(dim=1, keepdim=True)
    return torch.where(total > 0, values / total, otherwise)


def _draw(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """A token by the inverse of the distribution function; never one of probability 0."""
    total = probs.double().cumsum(dim=1)
    return (
        torch.searchsorted(total, (uniform * total[:, -1]).unsqueeze(1), right=True)
        .squeeze(1)
        .clamp(max=probs.shape[1] - 1)
    )
