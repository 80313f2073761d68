"""The pool of drafted nodes that a growing draft tree is chosen from.

The value of a node is the sum of the log probabilities along its path.  A log probability is at most 0, so a value
never exceeds its parent's, and a parent always has a lower pool index than its child: "highest value, ties to the
lower pool index" therefore never picks a node without its ancestors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_specplug.types import PADDING

#: Log probability of a node that does not exist or must not be used.
NEVER = float("-inf")


@dataclass
class DraftPool:
    """All nodes drafted so far, level-major: (level, beam parent, child rank).

    ``pool_width`` (``P``) is ``draft_top_k + (draft_depth - 1) * draft_top_k ** 2``.

    Attributes:
        token_ids: int64 ``[num_reqs, pool_width]``.
        parents: int64 ``[num_reqs, pool_width]``; pool index of the parent, ``PADDING`` for children of the root.
        log_values: float32 ``[num_reqs, pool_width]``; sum of log probabilities from the root; -inf where nothing is
            drafted yet or the node must not be used.
        depths: int64 ``[num_reqs, pool_width]``; 1 for children of the root.
        size: filled columns.
        level_start: first column of the newest level.
        num_levels: levels drafted so far.
    """

    token_ids: torch.Tensor
    parents: torch.Tensor
    log_values: torch.Tensor
    depths: torch.Tensor
    size: int = 0
    level_start: int = 0
    num_levels: int = 0


@dataclass(frozen=True)
class Beam:
    """The nodes of the newest level to feed to the drafter next.

    Attributes:
        nodes: int64 ``[num_reqs, beam_width]``; their pool indices.
        token_ids: int64 ``[num_reqs, beam_width]``.
        log_values: float32 ``[num_reqs, beam_width]``.
        sources: int64 ``[num_reqs * beam_width]``; the row of the last drafter forward that produced each node, counted
            over all requests.
        mask: bool ``[num_reqs, beam_width, num_fed]``; the ancestors of each node and the node itself, among all nodes
            fed so far (level-major, these included).
    """

    nodes: torch.Tensor
    token_ids: torch.Tensor
    log_values: torch.Tensor
    sources: torch.Tensor
    mask: torch.Tensor


def new_pool(num_reqs: int, draft_top_k: int, draft_depth: int, device: torch.device | str) -> DraftPool:
    """Allocate an empty pool for ``draft_depth`` levels: ``draft_top_k`` nodes, then ``draft_top_k ** 2`` each."""
    shape = (num_reqs, draft_top_k + (draft_depth - 1) * draft_top_k**2)
    return DraftPool(
        token_ids=torch.full(shape, PADDING, dtype=torch.int64, device=device),
        parents=torch.full(shape, PADDING, dtype=torch.int64, device=device),
        log_values=torch.full(shape, NEVER, dtype=torch.float32, device=device),
        depths=torch.zeros(shape, dtype=torch.int64, device=device),
    )
