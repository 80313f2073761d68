"""Multi-candidate rejection sampling over a tree of sampled drafts (SpecInfer, section 4.3).

The children of an accepted node are tried in the order of their draw.  With target distribution p and draft
distribution q, token x is accepted with probability min(1, p(x) / q(x)).  After a rejection p becomes
norm(max(0, p - q)), and q loses x and is renormalised, because the children were drawn without replacement.  If all
are rejected, the token is drawn from what remains of p.  The emitted tokens follow p exactly, provided that whether a
child is kept in the tree does not depend on its token (``draft_sampling.acceptance_log_probs``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_specplug.types import PADDING, Proposal, TokenTree

#: ``target_probs(rows [num_reqs]) -> float32 [num_reqs, vocab]``: the target's next-token distribution at a row of each
#: request.
TargetProbs = Callable[[torch.Tensor], torch.Tensor]


def accept_rejection(
    tree: TokenTree,
    proposal: Proposal,
    target_probs: TargetProbs,
    uniform: torch.Tensor,
    active: torch.Tensor,
    max_depth: int,
    sync_is_cheap: bool = False,
) -> torch.Tensor:
    """Walk the trees by rejection sampling.

    Args:
        tree: the verified trees.
        proposal: the distributions that the nodes were drawn from.
        target_probs: returns the target's distributions.
        uniform: float64 ``[num_reqs, max_depth, max_children + 1]``, uniform random numbers from 0 to 1; the last of
            each depth draws from the remaining target distribution.
        active: bool ``[num_reqs]``; the other requests emit nothing.
        max_depth: greatest depth of the trees.
        sync_is_cheap: whether values may be read to end early: on a CPU.

    Returns:
        int64 ``[num_reqs, max_depth]``; the accepted path and, if all children of its last node were rejected, the
        token drawn from the remaining target distribution; then ``PADDING``.  For a path that ends in a leaf, the
        caller still has to sample a token from the leaf's row.
    """
    num_reqs = len(active)
    token_ids = tree.token_ids.new_full((num_reqs, max_depth), PADDING)
    rows = torch.zeros_like(tree.num_rows)
    for depth in range(max_depth):
        if sync_is_cheap and not active.any():
            break
        remaining = target_probs(rows)
        is_child = (tree.parents == rows.unsqueeze(1)) & (tree.token_ids >= 0) & active.unsqueeze(1)
        rank = is_child.cumsum(dim=1)
        trying = is_child.any(dim=1)  # vLLM's sampler draws a leaf's token
        active = torch.zeros_like(active)
        drawn_from = _at(proposal.index, is_child.long().argmax(dim=1))
        candidates = _at(proposal.token_ids, drawn_from)
        draft_probs = _at(proposal.probs, drawn_from)
        for attempt in range(uniform.shape[2] - 1):
            found, child = (is_child & (rank == attempt + 1)).max(dim=1)
            tried = trying & found
            if sync_is_cheap and not tried.any():
                break
            token = _at(tree.token_ids, child).clamp(min=0)
            is_token = candidates == token.unsqueeze(1)
            draft_prob = (draft_probs * is_token).sum(dim=1)
            accepted = tried & (uniform[:, depth, attempt] * draft_prob < _at(remaining, token))
            rejected = (tried & ~accepted).unsqueeze(1)
            token_ids[:, depth] = torch.where(accepted, token, token_ids[:, depth])
            rows, active, trying = torch.where(accepted, child, rows), active | accepted, trying & ~accepted
            less = remaining.scatter(1, candidates, (remaining.gather(1, candidates) - draft_probs).clamp(min=0))
            remaining = torch.where(rejected, _normalised(less, remaining), remaining)
            without = draft_probs.masked_fill(is_token, 0)
            draft_probs = torch.where(rejected, _normalised(without, draft_probs), draft_probs)
        drawn = _draw(remaining, uniform[:, depth, -1])
        token_ids[:, depth] = torch.where(trying, drawn, token_ids[:, depth])
    return token_ids


def _at(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Select ``values[r, index[r]]``: ``[R, n, ...]`` and ``[R]`` -> ``[R, ...]``."""
    return values[torch.arange(len(index), device=index.device), index]


def _normalised(values: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """Scale to a sum of 1; ``otherwise`` where the sum is 0 (p equals q up to rounding)."""
    total = values.sum(dim=1, keepdim=True)
    return torch.where(total > 0, values / total, otherwise)


def _draw(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw a token by inverting the cumulative distribution; never one of probability 0."""
    total = probs.double().cumsum(dim=1)
    return (
        torch.searchsorted(total, (uniform * total[:, -1]).unsqueeze(1), right=True)
        .squeeze(1)
        .clamp(max=probs.shape[1] - 1)
    )
