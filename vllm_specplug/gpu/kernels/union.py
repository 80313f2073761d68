"""Merging of drafts in Triton: the pool of a union; its reference is ``tests/doubles/union_reference``.

One program merges the drafts of one request.  Rows with equal paths have the same leader: the first of the rows whose
token is equal and whose parents have the same leader.  Rows reach each other's values through buffers in device memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_specplug.core.pool import DraftPool
from vllm_specplug.gpu.kernels.lookup import log_sigmoid
from vllm_specplug.types import PADDING

_PADDING = tl.constexpr(PADDING)


@triton.jit
def _log_odds_of(edge, limit):
    """Compute log odds of a log probability, at most 0, in float64 without cancellation."""
    grown = tl.exp(edge)
    # 1 - exp(edge)
    missing = tl.where(grown == 1.0, -edge, (1.0 - grown) * (edge / tl.where(grown == 1.0, 1.0, tl.log(grown))))
    missing = tl.where(grown == 0.0, 1.0, missing)
    odds = tl.where(missing == 0.0, limit, edge - tl.log(tl.where(missing == 0.0, 1.0, missing)))
    return tl.minimum(tl.maximum(odds, -limit), limit)


@triton.jit
def _find_leaders(
    token_ids, depths, leaders, above, row, parent, num_rows, NP: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Write the leader of each row and that of its parent, from the roots down."""
    inside = row < num_rows
    token = tl.load(token_ids + row, mask=inside, other=_PADDING)
    depth = tl.load(depths + row, mask=inside, other=-1)
    exists = inside & (token != _PADDING)
    tl.store(leaders + row, row, mask=inside)
    deepest = tl.max(depth, axis=0)
    at = 0
    while at <= deepest:
        tl.debug_barrier()
        own = tl.where(depth == 0, 0, tl.load(leaders + parent, mask=inside, other=0))  # roots have no parent
        tl.store(above + row, own, mask=inside)
        tl.debug_barrier()
        first = tl.full([NP], NP, tl.int32)
        for begin in range(0, num_rows, TILE):
            other = begin + tl.arange(0, TILE)
            valid = other < num_rows
            tokens = tl.load(token_ids + other, mask=valid, other=_PADDING)
            same = (tokens != _PADDING)[None, :] & (tokens[None, :] == token[:, None])
            same = same & (tl.load(depths + other, mask=valid, other=-1)[None, :] == depth[:, None])
            same = same & (tl.load(above + other, mask=valid, other=-1)[None, :] == own[:, None])
            first = tl.minimum(first, tl.min(tl.where(same, other[None, :], NP), axis=1))
        tl.store(leaders + row, first, mask=exists & (depth == at))
        at += 1
    tl.debug_barrier()
    tl.store(above + row, tl.load(leaders + parent, mask=inside, other=0), mask=inside)
    tl.debug_barrier()


@triton.jit
def _find_pattern(
    token_ids, depths, leaders, above, flags, odds, estimates, source_ptr, row, parent, leader, exists, num_rows,
    NUM_SOURCES: tl.constexpr, NP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return each row's pattern of states, a digit to base 3 for each source, and write the sources' estimates."""
    inside = row < num_rows
    pattern = tl.zeros([NP], tl.int32)
    power = 1
    for source in range(NUM_SOURCES):
        first = tl.full([NP], NP, tl.int32)
        expanded = tl.zeros([NP], tl.int32)
        for begin in range(0, num_rows, TILE):
            other = begin + tl.arange(0, TILE)
            ours = (other < num_rows) & (tl.load(source_ptr + other, mask=other < num_rows, other=-1) == source)
            present = ours & (tl.load(token_ids + other, mask=ours, other=_PADDING) != _PADDING)
            same = (tl.load(leaders + other, mask=present, other=-1)[None, :] == leader[:, None]) & present[None, :]
            first = tl.minimum(first, tl.min(tl.where(same & exists[:, None], other[None, :], NP), axis=1))
            children = ours & (tl.load(depths + other, mask=ours, other=0) > 0)
            child = (tl.load(above + other, mask=children, other=-1)[None, :] == leader[:, None]) & children[None, :]
            expanded = tl.maximum(expanded, tl.max((child & exists[:, None]).to(tl.int32), axis=1))
        drafted = first < NP
        estimate = tl.load(odds + first, mask=drafted & inside, other=0.0)
        tl.store(estimates + source * num_rows + row, estimate, mask=inside)
        tl.store(flags + row, expanded, mask=inside)
        tl.debug_barrier()
        omitted = (tl.load(flags + parent, mask=inside, other=0) > 0) & (drafted == 0)
        tl.debug_barrier()
        pattern += power * (2 * drafted.to(tl.int32) + omitted.to(tl.int32))
        power *= 3
    return pattern


@triton.jit
def _merge_drafts_kernel(
    token_ids_ptr, depths_ptr, draft_parents_ptr, draft_values_ptr, source_ptr, start_ptr, weights_ptr, limit_ptr,
    num_rows, num_weights, leaders_ptr, above_ptr, flags_ptr, odds_ptr, estimates_ptr, parents_ptr, values_ptr,
    NUM_SOURCES: tl.constexpr, NUM_JUMPS: tl.constexpr, NP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64) * num_rows
    row = tl.arange(0, NP)
    inside = row < num_rows
    limit = tl.load(limit_ptr)
    token_ids, depths = token_ids_ptr + request, depths_ptr + request
    leaders, above, flags, odds = leaders_ptr + request, above_ptr + request, flags_ptr + request, odds_ptr + request
    start = tl.load(start_ptr + row, mask=inside, other=0)
    parent = tl.maximum(tl.load(draft_parents_ptr + request + row, mask=inside, other=0).to(tl.int32), 0) + start
    depth = tl.load(depths + row, mask=inside, other=0)
    node = depth > 0
    exists = inside & (tl.load(token_ids + row, mask=inside, other=_PADDING) != _PADDING)
    value = tl.load(draft_values_ptr + request + row, mask=node, other=0.0).to(tl.float64)
    edge = value - tl.load(draft_values_ptr + request + parent, mask=node, other=0.0).to(tl.float64)
    tl.store(odds + row, _log_odds_of(tl.where(node, tl.minimum(edge, 0.0), 0.0), limit), mask=inside)
    _find_leaders(token_ids, depths, leaders, above, row, parent, num_rows, NP, TILE)
    leader = tl.load(leaders + row, mask=inside, other=-1)

    pattern = _find_pattern(
        token_ids, depths, leaders, above, flags, odds, estimates_ptr + NUM_SOURCES * request, source_ptr, row, parent,
        leader, exists, num_rows, NUM_SOURCES, NP, TILE,
    )  # fmt: skip
    weights = weights_ptr + pattern * num_weights
    log_odds = tl.load(weights) + tl.load(weights + 1) * tl.log2(tl.maximum(depth, 1).to(tl.float64))
    for source in range(NUM_SOURCES):
        estimate = tl.load(estimates_ptr + NUM_SOURCES * request + source * num_rows + row, mask=inside, other=0.0)
        log_odds += tl.load(weights + 2 + source) * estimate
    value = tl.where(node, log_sigmoid(tl.minimum(tl.maximum(log_odds, -limit), limit)), 0.0)
    ancestor = parent
    for _ in range(NUM_JUMPS):  # sums along the paths: of the ancestors at distance 1, 2, 4 and so on
        tl.store(odds + row, value, mask=inside)
        tl.store(flags + row, ancestor, mask=inside)
        tl.debug_barrier()
        value += tl.load(odds + ancestor, mask=inside, other=0.0)
        ancestor = tl.load(flags + ancestor, mask=inside, other=0)
        tl.debug_barrier()
    merged = node & (leader == row)
    # A leader comes before the children of all rows with its path.
    upper = tl.where(depth == 1, _PADDING, tl.load(above + row, mask=inside, other=0))
    tl.store(parents_ptr + request + row, upper.to(tl.int64), mask=inside)
    tl.store(values_ptr + request + row, tl.where(merged, value, float("-inf")).to(tl.float32), mask=inside)


def merged_pool(
    token_ids: torch.Tensor,
    depths: torch.Tensor,
    parents: torch.Tensor,
    log_values: torch.Tensor,
    columns: tuple[torch.Tensor, torch.Tensor],
    max_width: int,
    weights: torch.Tensor,
    limit: torch.Tensor,
) -> DraftPool:
    """Merge the rows of several drafts into a pool, in one launch.

    Args:
        token_ids, depths, parents: int64 ``[num_reqs, num_rows]``, contiguous; the drafts' next to each other.
        log_values: float32, like them.
        columns: int32 ``[num_rows]`` each; the source of a column, and the source's first column.
        max_width: rows of the widest draft.
        weights: float64 ``[3 ** num_sources, 2 + 2 * num_sources]``; see ``proposers.union.learning``.
        limit: float64 ``[1]``; of log odds.
    """
    (num_reqs, num_rows), device = token_ids.shape, token_ids.device
    num_sources = (weights.shape[1] - 2) // 2
    leaders, above, flags = (torch.empty(num_reqs, num_rows, dtype=torch.int32, device=device) for _ in range(3))
    odds = torch.empty(num_reqs, num_rows, dtype=torch.float64, device=device)
    estimates = odds.new_empty(num_reqs, num_sources, num_rows)
    pool = DraftPool(token_ids, torch.empty_like(parents), torch.empty_like(log_values), depths, size=num_rows)
    padded = triton.next_power_of_2(num_rows)
    _merge_drafts_kernel[(num_reqs,)](
        token_ids, depths, parents, log_values, *columns, weights, limit, num_rows, weights.shape[1],
        leaders, above, flags, odds, estimates, pool.parents, pool.log_values,
        NUM_SOURCES=num_sources, NUM_JUMPS=(max_width - 1).bit_length(), NP=padded,
        TILE=max(1, min(padded, 2048 // padded)), num_warps=8,
    )  # fmt: skip
    return pool
