"""Building draft trees as flat rows: a chain, a fixed shape, or a flat list of parents.

Trees that a drafter grows node by node come from ``growth`` and ``pruning``.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from vllm_specplug.types import PADDING, TokenTree


def chain_tree(root_token_ids: torch.Tensor, draft_token_ids: torch.Tensor, num_drafts: torch.Tensor) -> TokenTree:
    """Build trees without branches.

    Args:
        root_token_ids: int ``[num_reqs]``.
        draft_token_ids: int ``[num_reqs, num_nodes]``; ``PADDING`` among the drafts is a node that no token matches.
        num_drafts: int ``[num_reqs]``; valid drafts of each request.
    """
    rows = torch.arange(draft_token_ids.shape[1] + 1, device=draft_token_ids.device).unsqueeze(0)
    token_ids = torch.cat([root_token_ids.unsqueeze(1).long(), draft_token_ids.long()], dim=1)
    return padded_tree(token_ids, rows - 1, rows, num_drafts.long() + 1)


def static_tree(root_token_ids: torch.Tensor, node_token_ids: torch.Tensor, parents: tuple[int, ...]) -> TokenTree:
    """Fill tokens into trees of a fixed shape (EAGLE-1, Medusa).

    Args:
        root_token_ids: int ``[num_reqs]``.
        node_token_ids: int ``[num_reqs, num_nodes]``.
        parents: the shape; ``parents[i]`` is the row of the parent of node ``i``, whose own row is ``i + 1`` (row 0 is
            the root).
    """
    if len(parents) != node_token_ids.shape[1]:
        raise ValueError(f"the shape has {len(parents)} nodes, {node_token_ids.shape[1]} tokens were given")
    shape_parents, shape_depths = _static_shape(tuple(parents), node_token_ids.device)
    token_ids = torch.cat([root_token_ids.unsqueeze(1).long(), node_token_ids.long()], dim=1)
    num_rows = torch.full_like(token_ids[:, 0], len(parents) + 1)
    return TokenTree(token_ids, shape_parents.expand_as(token_ids), shape_depths.expand_as(token_ids), num_rows)


@lru_cache(maxsize=64)
def _static_shape(parents: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return parents and depths of a fixed shape, int64 ``[1, num_rows]``; uploaded once per shape and device."""
    validate_parents(parents)
    rows = torch.tensor([[PADDING, *parents]], dtype=torch.int64, device=device)
    return rows, depths_from_parents(rows)


def validate_parents(parents: tuple[int, ...]) -> None:
    """Raise ``ValueError`` unless ``parents`` is a parent-first tree in the form ``static_tree`` takes."""
    for node, parent in enumerate(parents):
        if isinstance(parent, bool) or not isinstance(parent, int):
            raise ValueError(f"the parent of node {node} must be an int, not {parent!r}")
        if not 0 <= parent <= node:
            raise ValueError(
                f"the parent of node {node} (row {node + 1}) is row {parent}; "
                f"it must be a row above its own, from 0 (the root) to {node}"
            )


def from_flat(token_ids: torch.Tensor, parents: torch.Tensor, num_rows: torch.Tensor) -> TokenTree:
    """Build trees from flat rows; rows from ``num_rows`` on are replaced by padding.

    Args:
        token_ids: int ``[num_reqs, num_rows]``; row 0 is the root.
        parents: int ``[num_reqs, num_rows]``; row of the parent; ignored for the root.
        num_rows: int ``[num_reqs]``; valid rows.
    """
    parents = parents.long().clone()
    parents[:, 0] = PADDING
    parents = parents.masked_fill(~valid_rows(num_rows, parents.shape[1]), PADDING)
    return padded_tree(token_ids.long(), parents, depths_from_parents(parents), num_rows.long())


def depths_from_parents(parents: torch.Tensor) -> torch.Tensor:
    """Count the ancestors of each row by pointer jumping.

    Args:
        parents: int64 ``[num_reqs, num_rows]``; ``PADDING`` for the root and padding rows.

    Returns:
        int64 ``[num_reqs, num_rows]``; 0 for the root and padding rows.
    """
    depths = (parents >= 0).long()
    ancestor = parents.clamp(min=0)  # the root is its own ancestor, at distance 0
    for _ in range((parents.shape[1] - 1).bit_length()):  # each pass doubles the distance covered
        depths = depths + depths.gather(1, ancestor)
        ancestor = ancestor.gather(1, ancestor)
    return depths


def valid_rows(num_rows: torch.Tensor, width: int) -> torch.Tensor:
    """Mark the first ``num_rows`` (int ``[num_reqs]``) rows of each request: bool ``[num_reqs, width]``."""
    return torch.arange(width, device=num_rows.device) < num_rows.unsqueeze(1)


def padded_tree(
    token_ids: torch.Tensor, parents: torch.Tensor, depths: torch.Tensor, num_rows: torch.Tensor
) -> TokenTree:
    """Build a ``TokenTree`` from int64 tensors ``[num_reqs or 1, width]``; rows from ``num_rows`` on become padding."""
    padding = ~valid_rows(num_rows, token_ids.shape[1])
    return TokenTree(
        token_ids=token_ids.masked_fill(padding, PADDING),
        parents=parents.masked_fill(padding, PADDING),
        depths=depths.masked_fill(padding, 0),
        num_rows=num_rows,
    )
