"""Choosing the nodes to verify: the best of a pool (``rerank_draft``), or some of a draft (``prune``)."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch.nn.functional import pad

from vllm_specplug.core.pool import NEVER, DraftPool
from vllm_specplug.core.tree import padded_tree, valid_rows
from vllm_specplug.types import PADDING, Draft, TokenTree


def rerank_draft(
    pool: DraftPool, root_token_ids: torch.Tensor, num_nodes: int, min_node_value: float = 0.0
) -> tuple[Draft, torch.Tensor]:
    """Keep the best ``num_nodes`` drafted nodes as a tree (EAGLE-2, section 4.2, reranking).

    Ties go to the lower pool index, hence to the shallower node: a child that ties its parent is never kept without
    it.  Rows are in pool order, which is parent-first and level by level.

    Args:
        pool: the drafted nodes.
        root_token_ids: int ``[num_reqs]``; the last emitted tokens.
        num_nodes: nodes to keep; fewer are kept where fewer were drafted.
        min_node_value: nodes of a lower value (a probability) are not kept; no child's value exceeds its parent's.

    Returns:
        Trees of ``num_nodes + 1`` rows with the values of their nodes, and int64 ``[num_reqs, num_nodes + 1]``: the
        pool index of each row, ``PADDING`` for the root and padding rows.
    """
    values, order = pool.log_values[:, : pool.size].sort(dim=1, descending=True, stable=True)
    floor = math.log(min_node_value) if min_node_value > 0 else NEVER
    unusable = (values[:, :num_nodes] == NEVER) | (values[:, :num_nodes] < floor)
    # Unusable nodes sort to the end: their pool index is replaced by one past the last.
    chosen = order[:, :num_nodes].masked_fill(unusable, pool.size).sort(dim=1).values
    padding = chosen == pool.size
    index = chosen.clamp(max=pool.size - 1)
    # Row of a parent = how many chosen indices are <= its index; the root's -1 gives row 0.
    parent_rows = torch.searchsorted(chosen, pool.parents.gather(1, index), right=True)
    missing = max(num_nodes - pool.size, 0)

    def with_root(nodes: torch.Tensor, fill: float) -> torch.Tensor:
        return pad(nodes.masked_fill(padding, fill), (1, missing), value=fill)

    token_ids = with_root(pool.token_ids.gather(1, index), PADDING)
    token_ids[:, 0] = root_token_ids
    tree = TokenTree(
        token_ids=token_ids,
        parents=with_root(parent_rows, PADDING),
        depths=with_root(pool.depths.gather(1, index), 0),
        num_rows=padding.shape[1] + 1 - padding.sum(dim=1),
    )
    log_values = with_root(pool.log_values.gather(1, index), NEVER)
    log_values[:, 0] = 0.0
    return Draft(tree, log_values), with_root(index, PADDING)


def best_nodes(draft: Draft, num_nodes: int) -> Draft:
    """Keep the best ``num_nodes`` nodes of each tree, without reading values back from a device.

    Args:
        draft: trees of at least as many nodes.
        num_nodes: nodes to keep.
    """
    tree = draft.tree
    token_ids, depths = (rows[:, 1:].contiguous() for rows in (tree.token_ids, tree.depths))
    # In a pool the root has index -1, so that rows count from the first node.
    parents = (tree.parents[:, 1:] - 1).clamp(min=PADDING)
    log_values = draft.log_values[:, 1:].contiguous()
    pool = DraftPool(token_ids, parents, log_values, depths, size=token_ids.shape[1])
    return rerank_draft(pool, tree.token_ids[:, 0], num_nodes)[0]


def prune(draft: Draft, keep: torch.Tensor) -> Draft:
    """Remove nodes from a draft.

    Args:
        draft: the trees.
        keep: bool ``[num_reqs, num_rows]``; true for the nodes to keep, whose parents must be kept too; ignored for
            roots and padding rows.
    """
    tree = draft.tree
    keep = keep & valid_rows(tree.num_rows, keep.shape[1])
    keep[:, 0] = True
    num_rows = keep.sum(dim=1)
    order = keep.sort(dim=1, descending=True, stable=True).indices[:, : int(num_rows.max())]
    new_rows = keep.cumsum(dim=1) - 1
    parents = tree.parents.gather(1, order)
    parents = new_rows.gather(1, parents.clamp(min=0)).masked_fill(parents < 0, PADDING)
    padding = ~valid_rows(num_rows, order.shape[1])
    bits = None if draft.source_bits is None else draft.source_bits.gather(1, order).masked_fill(padding, 0)
    pruned = padded_tree(tree.token_ids.gather(1, order), parents, tree.depths.gather(1, order), num_rows)
    log_values = draft.log_values.gather(1, order).masked_fill(padding, NEVER)
    return replace(draft, tree=pruned, log_values=log_values, source_bits=bits, proposal=None)
