"""Growing, reranking and building draft trees (EAGLE-2: expand and rerank, PAPERS.md section 2).

A drafter grows a tree level by level into a ``DraftPool``; ``rerank`` keeps its best nodes.  Builders for trees
that are not grown (a chain, a fixed shape, a flat list of parents) are at the end.

The value of a node is the sum of the log confidences along its path.  Log confidences are at most 0, so a value never
exceeds its parent's, and a parent always has a lower pool index than its child: "highest value, ties to the lower
pool index" therefore never picks a node without its ancestors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch.nn.functional import pad

from vllm_specplug.core import tree_loops
from vllm_specplug.types import PADDING, Draft, TokenTree

NEVER = float("-inf")


@dataclass
class DraftPool:
    """All nodes drafted so far, level-major: (level, beam parent, child rank).

    ``pool_width`` (``P``) is ``draft_top_k + (draft_depth - 1) * draft_top_k ** 2``.

    Attributes:
        token_ids: int64 ``[num_reqs, pool_width]``.
        parents: int64 ``[num_reqs, pool_width]``; pool index of the parent, ``PADDING`` for children of the root.
        log_values: float32 ``[num_reqs, pool_width]``; sum of log confidences from the root; -inf where nothing is
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
    """The nodes to feed to the drafter next.

    Attributes:
        nodes: int64 ``[num_reqs, beam_width]``; their pool indices.
        token_ids: int64 ``[num_reqs, beam_width]``.
        log_values: float32 ``[num_reqs, beam_width]``.
        sources: int64 ``[num_reqs * beam_width]``; which row of the last drafter forward, all requests' rows counted,
            gave each node.
        mask: bool ``[num_reqs, beam_width, num_fed]``; of all nodes fed so far (level-major), these included, each
            one's ancestors and itself.
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


def expand(pool: DraftPool, beam: torch.Tensor | None, token_ids: torch.Tensor, log_probs: torch.Tensor) -> DraftPool:
    """Append one level to the pool, in place.

    Args:
        pool: the pool to extend.
        beam: int64 ``[num_reqs, beam_width]``; pool indices of the nodes that the drafter was fed, or None for the
            first level, whose parent is the root (``beam_width`` is then 1).
        token_ids: int ``[num_reqs, beam_width, draft_top_k]``; the children of each fed node, best first.
        log_probs: float ``[num_reqs, beam_width, draft_top_k]``; their log confidences.  NaN and -inf mean "no node";
            above 0 counts as 0, because values must not grow along a path.

    Returns:
        ``pool`` itself.
    """
    start, stop = pool.size, pool.size + token_ids.shape[1] * token_ids.shape[2]
    if stop > pool.token_ids.shape[1]:
        raise ValueError(f"the pool holds {pool.token_ids.shape[1]} nodes, {stop} would be drafted")
    # Accumulate in float32 whatever the drafter computes in: bfloat16 sums would tie most siblings.
    values = log_probs.float().nan_to_num(nan=NEVER, posinf=0.0, neginf=NEVER).clamp(max=0.0)
    if beam is not None:
        # Adding a number <= 0 never rounds up past the parent's value, so the tree stays monotone.
        values = values + pool.log_values.gather(1, beam).unsqueeze(2)
        pool.parents[:, start:stop] = beam.unsqueeze(2).expand_as(token_ids).flatten(1)
    pool.token_ids[:, start:stop] = token_ids.flatten(1)
    pool.log_values[:, start:stop] = values.flatten(1)
    pool.num_levels += 1
    pool.depths[:, start:stop] = pool.num_levels
    pool.level_start, pool.size = start, stop
    return pool


def next_beam(pool: DraftPool, draft_top_k: int) -> torch.Tensor:
    """Pick the nodes of the newest level to feed to the drafter next.

    Returns:
        int64 ``[num_reqs, beam_width]``, ``beam_width = min(draft_top_k, level width)``; pool indices of the best
        nodes by value (ties to the lower index), in ascending order.
    """
    if pool.size - pool.level_start <= draft_top_k:
        everything = torch.arange(pool.level_start, pool.size, device=pool.log_values.device)
        return everything.expand(pool.log_values.shape[0], -1)
    order = _best_first(pool.log_values[:, pool.level_start : pool.size])[:, :draft_top_k]
    return order.sort(dim=1).values + pool.level_start


def growth_can_pay(pool: DraftPool, num_nodes: int) -> torch.Tensor:
    """Tell whether any deeper node could still be among the best ``num_nodes``.

    A deeper node is worth at most the newest level's best and loses ties to every node already drafted.

    Returns:
        bool ``[num_reqs]``.
    """
    drafted = pool.log_values[:, : pool.size]
    bound = drafted[:, pool.level_start :].amax(dim=1, keepdim=True)
    if pool.size < num_nodes:
        return bound.squeeze(1) > NEVER
    at_least_as_good = (drafted >= bound).sum(dim=1)
    return (at_least_as_good < num_nodes) & (bound.squeeze(1) > NEVER)


def grow_level(
    pool: DraftPool,
    beam: Beam | None,
    token_ids: torch.Tensor,
    log_probs: torch.Tensor,
    num_nodes: int,
    static: bool = False,
) -> Beam | None:
    """Append one level to the pool, in place, and pick what to feed next: ``expand``, then ``next_beam``.

    Args:
        pool: the pool to extend.
        beam: the nodes that were fed; None for the first level.
        token_ids: int ``[num_reqs * beam_width, draft_top_k]``; the children of each, best first.
        log_probs: float ``[num_reqs * beam_width, draft_top_k]``; see ``expand``.
        num_nodes: nodes that the tree will have.
        static: look at no value (only on a CPU values are looked at at all).

    Returns:
        None where the growth ends: the pool is full, or it is seen that no deeper node would be kept.
    """
    if not static and tree_loops.is_cpu_without_autograd(pool.log_values, token_ids, log_probs):
        fields = tree_loops.grow_level(pool, beam, token_ids, log_probs, num_nodes)
        return None if fields is None else Beam(*fields)
    num_reqs, top_k = pool.token_ids.shape[0], token_ids.shape[1]
    device, shape = token_ids.device, (num_reqs, -1, top_k)
    expand(pool, None if beam is None else beam.nodes, token_ids.view(shape), log_probs.view(shape))
    if pool.size == pool.token_ids.shape[1]:
        return None
    sync_is_cheap = device.type == "cpu" and not static  # reading a flag back stalls other devices
    if sync_is_cheap and not growth_can_pay(pool, num_nodes).any():
        return None
    nodes = next_beam(pool, top_k)
    # Which of the last fed nodes is each beam node's parent: columns are (beam parent, child rank).
    parent = (nodes - pool.level_start) // top_k
    mask = torch.eye(nodes.shape[1], dtype=torch.bool, device=device).expand(num_reqs, -1, -1)
    num_fed = 1
    if beam is not None:
        num_fed = beam.nodes.shape[1]
        above = beam.mask.gather(1, parent.unsqueeze(2).expand(-1, -1, beam.mask.shape[2]))
        mask = torch.cat([above, mask], dim=2)
    first = torch.arange(0, num_reqs * num_fed, num_fed, device=device).unsqueeze(1)
    values = pool.log_values.gather(1, nodes)
    return Beam(nodes, pool.token_ids.gather(1, nodes), values, (first + parent).flatten(), mask)


def rerank(pool: DraftPool, root_token_ids: torch.Tensor, num_nodes: int, min_node_value: float = 0.0) -> TokenTree:
    """The tree of ``rerank_draft``, without the values of its rows."""
    return rerank_draft(pool, root_token_ids, num_nodes, min_node_value)[0].tree


def rerank_draft(
    pool: DraftPool, root_token_ids: torch.Tensor, num_nodes: int, min_node_value: float = 0.0
) -> tuple[Draft, torch.Tensor]:
    """Keep the best ``num_nodes`` drafted nodes as a tree (EAGLE-2, reranking).

    Ties go to the lower pool index, hence to the shallower node: a child that ties its parent is never kept without
    it.  Rows are in pool order, which is parent-first and level by level.

    Args:
        pool: the drafted nodes.
        root_token_ids: int ``[num_reqs]``; the last emitted tokens.
        num_nodes: nodes to keep; fewer are kept where fewer were drafted.
        min_node_value: nodes of a lower value are not kept (no parent is worth less than its child).

    Returns:
        Trees of ``num_nodes + 1`` rows with the values of their nodes, and int64 ``[num_reqs, num_nodes + 1]``: the
        pool index of each row, ``PADDING`` for the root and padding rows.
    """
    if tree_loops.is_cpu_without_autograd(pool.log_values, pool.token_ids, root_token_ids):
        fields = tree_loops.rerank(pool, root_token_ids, num_nodes, min_node_value)
        if fields is not None:
            *rows, log_values, places = fields
            return Draft(TokenTree(*rows), log_values), places
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


def prune(draft: Draft, keep: torch.Tensor) -> Draft:
    """The draft without some of its nodes.

    Args:
        draft: the trees.
        keep: bool ``[num_reqs, num_rows]``; true for the nodes to keep, whose parents must be kept too; what it says of
            roots and padding does not matter.
    """
    tree = draft.tree
    if tree_loops.is_cpu_without_autograd(tree.parents, draft.log_values, keep):
        fields = tree_loops.prune(draft, keep)
        if fields is not None:
            *rows, log_values, bits = fields
            bits = None if draft.source_bits is None else bits
            return Draft(TokenTree(*rows), log_values, draft.source_names, bits)
    keep = keep & valid_rows(tree.num_rows, keep.shape[1])
    keep[:, 0] = True
    num_rows = keep.sum(dim=1)
    order = keep.sort(dim=1, descending=True, stable=True).indices[:, : int(num_rows.max())]
    places = keep.cumsum(dim=1) - 1
    parents = tree.parents.gather(1, order)
    parents = places.gather(1, parents.clamp(min=0)).masked_fill(parents < 0, PADDING)
    padding = ~valid_rows(num_rows, order.shape[1])
    bits = None if draft.source_bits is None else draft.source_bits.gather(1, order).masked_fill(padding, 0)
    pruned = _with_padding(tree.token_ids.gather(1, order), parents, tree.depths.gather(1, order), num_rows)
    log_values = draft.log_values.gather(1, order).masked_fill(padding, NEVER)
    return replace(draft, tree=pruned, log_values=log_values, source_bits=bits, proposal=None)


def _best_first(values: torch.Tensor) -> torch.Tensor:
    """Indices ``[num_reqs, n]`` by falling value; unlike ``torch.topk``, equal values keep their order."""
    return values.sort(dim=1, descending=True, stable=True).indices


def chain_tree(root_token_ids: torch.Tensor, draft_token_ids: torch.Tensor, num_drafts: torch.Tensor) -> TokenTree:
    """Build trees without branches.

    Args:
        root_token_ids: int ``[num_reqs]``.
        draft_token_ids: int ``[num_reqs, num_nodes]``; a drafted ``PADDING`` is a node that no token matches.
        num_drafts: int ``[num_reqs]``; valid drafts of each request.
    """
    rows = torch.arange(draft_token_ids.shape[1] + 1, device=draft_token_ids.device).unsqueeze(0)
    token_ids = torch.cat([root_token_ids.unsqueeze(1).long(), draft_token_ids.long()], dim=1)
    return _with_padding(token_ids, rows - 1, rows, num_drafts.long() + 1)


def static_tree(root_token_ids: torch.Tensor, node_token_ids: torch.Tensor, parents: tuple[int, ...]) -> TokenTree:
    """Fill tokens into a fixed shape (EAGLE-1, Medusa).

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
    """Parents and depths of a fixed shape, int64 ``[1, num_rows]`` each; one upload per shape and device."""
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
    """Build trees from flat rows; whatever stands behind the valid rows is replaced by padding.

    Args:
        token_ids: int ``[num_reqs, num_rows]``; row 0 is the root.
        parents: int ``[num_reqs, num_rows]``; row of the parent; anything for the root.
        num_rows: int ``[num_reqs]``; valid rows.
    """
    if tree_loops.is_cpu_without_autograd(token_ids, parents, num_rows):
        fields = tree_loops.from_flat(token_ids, parents, num_rows)
        if fields is not None:
            return TokenTree(*fields, num_rows.long())
    parents = parents.long().clone()
    parents[:, 0] = PADDING
    parents = parents.masked_fill(~valid_rows(num_rows, parents.shape[1]), PADDING)
    return _with_padding(token_ids.long(), parents, depths_from_parents(parents), num_rows.long())


def truncate(tree: TokenTree, num_rows: torch.Tensor) -> TokenTree:
    """Keep the first ``num_rows`` (int ``[num_reqs]``, the root counted) rows of each tree; the root always stays."""
    kept = torch.minimum(tree.num_rows, num_rows.long()).clamp(min=1)
    return _with_padding(tree.token_ids, tree.parents, tree.depths, kept)


def depths_from_parents(parents: torch.Tensor) -> torch.Tensor:
    """Count the ancestors of each row by pointer jumping.

    Args:
        parents: int64 ``[num_reqs, num_rows]``; ``PADDING`` for the root and padding rows.

    Returns:
        int64 ``[num_reqs, num_rows]``; 0 for the root and padding rows.
    """
    if tree_loops.is_cpu_without_autograd(parents):
        known = tree_loops.depths_from_parents(parents)
        if known is not None:
            return known
    depths = (parents >= 0).long()
    ancestor = parents.clamp(min=0)  # The root is its own ancestor, at distance 0.
    sync_is_cheap = parents.device.type == "cpu"  # trees are much shallower than wide
    for _ in range((parents.shape[1] - 1).bit_length()):  # Each round doubles the distance covered.
        if sync_is_cheap and not ancestor.any():
            break
        depths = depths + depths.gather(1, ancestor)
        ancestor = ancestor.gather(1, ancestor)
    return depths


def valid_rows(num_rows: torch.Tensor, width: int) -> torch.Tensor:
    """Bool ``[num_reqs, width]``, true for the first ``num_rows`` (int ``[num_reqs]``) rows of each request."""
    return torch.arange(width, device=num_rows.device) < num_rows.unsqueeze(1)


def _with_padding(
    token_ids: torch.Tensor, parents: torch.Tensor, depths: torch.Tensor, num_rows: torch.Tensor
) -> TokenTree:
    """A ``TokenTree`` of int64 tensors ``[num_reqs or 1, num_rows]`` with everything behind ``num_rows`` padded."""
    padding = ~valid_rows(num_rows, token_ids.shape[1])
    return TokenTree(
        token_ids=token_ids.masked_fill(padding, PADDING),
        parents=parents.masked_fill(padding, PADDING),
        depths=depths.masked_fill(padding, 0),
        num_rows=num_rows,
    )
