"""Trees from chains of drafted tokens, with siblings by confidence (SWIFT, section 4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_specplug.core.pool import NEVER, DraftPool
from vllm_specplug.cpu.kernels.tree_ops import rerank_draft
from vllm_specplug.types import Draft

#: Pairs (bound, count): up to this top-1 probability, the ``count`` best tokens are verified; above the last, one.
BANDS = ((0.5, 10), (0.8, 5), (0.95, 3))
MAX_SIBLINGS = BANDS[0][1]


@dataclass(frozen=True)
class DraftedLevel:
    """The best next tokens of the chains that are still drafted.

    Attributes:
        requests: int64 ``[num_chains]``; the request of each chain.
        token_ids: int64 ``[num_chains, num_siblings]``; best first; the chain continues with the first.
        probs: float32 ``[num_chains, num_siblings]``; their probabilities.
    """

    requests: torch.Tensor
    token_ids: torch.Tensor
    probs: torch.Tensor


def num_siblings(confidence: torch.Tensor) -> torch.Tensor:
    """Return how many tokens to verify at a position, int64, from its top-1 probability: 10 in (0, 0.5], 5 in (0.5,
    0.8], 3 in (0.8, 0.95], 1 in (0.95, 1]."""
    bounds = torch.tensor([bound for bound, _ in BANDS], device=confidence.device)
    counts = torch.tensor([count for _, count in BANDS] + [1], device=confidence.device)
    return counts[torch.bucketize(confidence.contiguous(), bounds)]


def chain_with_siblings(root_token_ids: torch.Tensor, levels: Sequence[DraftedLevel], num_nodes: int) -> Draft:
    """Build the trees to verify: of all drafted tokens, the ``num_nodes`` best by the product of probabilities.

    Args:
        root_token_ids: int64 ``[num_reqs]``; last emitted tokens.
        levels: by depth.  A request without a chain in one level has none in the deeper levels.
        num_nodes: most nodes of a tree.
    """
    num_reqs, width = len(root_token_ids), MAX_SIBLINGS
    max_depth = len(levels)
    shape = (num_reqs, max_depth, width)
    token_ids, log_values = torch.zeros(shape, dtype=torch.int64), torch.full(shape, NEVER)
    above = torch.zeros(num_reqs)
    for depth, level in enumerate(levels):
        siblings = level.token_ids.shape[1]
        values = above[level.requests].unsqueeze(1) + level.probs.log()
        drafted = torch.arange(siblings) < num_siblings(level.probs[:, 0]).unsqueeze(1)
        token_ids[level.requests, depth, :siblings] = level.token_ids
        log_values[level.requests, depth, :siblings] = values.masked_fill(~drafted, NEVER)
        above[level.requests] = values[:, 0]
    # A node's parent is the best token of the level above.
    parents = torch.arange(-1, max_depth - 1).mul(width).clamp(min=-1).repeat_interleave(width)
    depths = torch.arange(1, max_depth + 1).repeat_interleave(width)
    pool = DraftPool(
        token_ids=token_ids.flatten(1),
        parents=parents.expand(num_reqs, -1),
        log_values=log_values.flatten(1),
        depths=depths.expand(num_reqs, -1),
        size=parents.numel(),
    )
    return rerank_draft(pool, root_token_ids, num_nodes)[0]
