"""Prompt lookup in Triton: the search for earlier matches, and the tree of their continuations.

The references are in ``proposers.lookup.device``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_specplug.core.pool import DraftPool
from vllm_specplug.types import PADDING

_BLOCK = 1024
_PADDING = tl.constexpr(PADDING)


@triton.jit
def _match_lengths(own, positions, end, MAX_MATCH: tl.constexpr, BLOCK: tl.constexpr):
    """Count how many tokens up to and including each position equal the last ones, up to ``end``."""
    matches = positions < end
    lengths = tl.zeros([BLOCK], tl.int32)
    back = 0
    # Few positions match: most programs read their tokens only once.
    while (back < MAX_MATCH) & (tl.max(matches.to(tl.int32), axis=0) > 0):
        here = tl.load(own + positions - back, mask=matches & (positions >= back), other=-1)
        # ``end - back`` is not negative: a matching position is at least ``back - 1`` and below ``end``.
        matches = matches & (here == tl.load(own + end - back))
        lengths += matches.to(tl.int32)
        back += 1
    return lengths


@triton.jit
def _match_keys_kernel(
    tokens_ptr,
    slots_ptr,
    lens_ptr,
    keys_ptr,
    max_len,
    MIN_MATCH: tl.constexpr,
    MAX_MATCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    end = tl.load(lens_ptr + slot) - 1
    own = tokens_ptr + slot * max_len
    positions = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    lengths = _match_lengths(own, positions, end, MAX_MATCH, BLOCK)
    keys = tl.where(lengths >= MIN_MATCH, lengths * max_len + positions, 0)
    tl.store(keys_ptr + request * max_len + positions, keys, mask=positions < max_len)


def match_keys(
    token_ids: torch.Tensor, slots: torch.Tensor, lens: torch.Tensor, min_match: int, max_match: int
) -> torch.Tensor:
    """Find earlier matches; arguments and result as in the reference, all contiguous."""
    num_reqs, max_len = slots.shape[0], token_ids.shape[1]
    keys = torch.empty(num_reqs, max_len, dtype=torch.int32, device=token_ids.device)
    _match_keys_kernel[(num_reqs, triton.cdiv(max_len, _BLOCK))](
        token_ids, slots, lens, keys, max_len, MIN_MATCH=min_match, MAX_MATCH=max_match, BLOCK=_BLOCK
    )
    return keys


@triton.jit
def _best_matches_kernel(
    tokens_ptr, slots_ptr, lens_ptr, best_ptr, max_len,
    MIN_MATCH: tl.constexpr, MAX_MATCH: tl.constexpr, COUNT: tl.constexpr, COUNT_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the best matches in one block of a request's positions."""
    request = tl.program_id(0).to(tl.int64)
    own_best = best_ptr + (request * tl.num_programs(1) + tl.program_id(1)) * COUNT
    slot = tl.load(slots_ptr + request).to(tl.int64)
    end = 0
    if slot >= 0:
        end = tl.load(lens_ptr + slot) - 1
    own = tokens_ptr + tl.maximum(slot, 0) * max_len
    positions = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    lengths = _match_lengths(own, positions, end, MAX_MATCH, BLOCK)
    keys = tl.where(lengths >= MIN_MATCH, lengths * max_len + positions, 0)
    found = 0
    best = tl.max(keys, axis=0)
    while (found < COUNT) & (best > 0):  # few blocks have a match
        tl.store(own_best + found, best)
        keys = tl.where(keys == best, 0, keys)
        best = tl.max(keys, axis=0)
        found += 1
    rest = tl.arange(0, COUNT_PADDED)
    tl.store(own_best + rest, tl.zeros([COUNT_PADDED], tl.int32), mask=(rest >= found) & (rest < COUNT))


@triton.jit
def log_sigmoid(x):
    """Compute -log(1 + exp(-x)) in float64 without cancellation."""
    small = tl.exp(-tl.abs(x))
    one_more = 1.0 + small
    rounded = one_more - 1.0
    log1p = tl.where(rounded == 0.0, small, tl.log(one_more) * (small / tl.where(rounded == 0.0, 1.0, rounded)))
    return tl.minimum(x, 0.0) - log1p


@triton.jit
def _largest(values, column, COUNT: tl.constexpr, COUNT_PADDED: tl.constexpr):
    """Return the largest ``COUNT`` values, largest first; those above 0 differ."""
    found = tl.zeros([COUNT_PADDED], tl.int32)
    for i in range(COUNT):
        best = tl.max(values, axis=0)
        found = tl.where(column == i, best, found)
        values = tl.where(values == best, 0, values)
    return found


@triton.jit
def _prefix_tree_kernel(
    best_ptr, num_best, tokens_ptr, slots_ptr, lens_ptr, max_len, table_ptr,
    token_ids_ptr, parents_ptr, values_ptr, depths_ptr, matches_ptr,
    DEPTH: tl.constexpr, COUNT: tl.constexpr, COUNT_PADDED: tl.constexpr, BEST_PADDED: tl.constexpr,
):  # fmt: skip
    """Merge the matches of a request's blocks and build the pool of their continuations."""
    request = tl.program_id(0).to(tl.int64)
    slot = tl.maximum(tl.load(slots_ptr + request).to(tl.int64), 0)
    column = tl.arange(0, COUNT_PADDED)
    place = tl.arange(0, BEST_PADDED)
    candidates = tl.load(best_ptr + request * num_best + place, mask=place < num_best, other=0)
    keys = _largest(candidates, column, COUNT, COUNT_PADDED)
    lengths = keys // max_len
    positions = keys % max_len
    ages = tl.maximum(tl.load(lens_ptr + slot) - 1 - positions, 1)
    exists = lengths > 0
    longest = tl.max(lengths, axis=0)
    weight_of = tl.where(exists, tl.exp2((lengths - longest).to(tl.float64)), 0.0)
    parent_weight = tl.sum(weight_of, axis=0) + tl.zeros([COUNT_PADDED], tl.float64)
    same = exists[:, None] & exists[None, :]
    value = tl.zeros([COUNT_PADDED], tl.float64)
    leader_above = column
    log_age = tl.log2((ages + 1).to(tl.float64))
    matches = matches_ptr + request * 2 * COUNT + column
    tl.store(matches, lengths, mask=column < COUNT)
    tl.store(matches + COUNT, ages, mask=column < COUNT)
    least, limit = tl.load(table_ptr), tl.load(table_ptr + 1)
    own = table_ptr + 2  # the weights of matches in the request itself come first
    one, match = tl.load(own), tl.load(own + 1)
    share, support, age = tl.load(own + 2), tl.load(own + 3), tl.load(own + 4)
    for depth in range(DEPTH):
        # At the end of the known tokens, a repetition continues from its beginning.
        ahead = tl.minimum(positions + 1 + depth % ages, max_len - 1)
        token = tl.load(tokens_ptr + slot * max_len + ahead, mask=exists, other=0)
        same = same & (token[:, None] == token[None, :])
        leader = tl.min(tl.where(same, column[None, :], COUNT_PADDED), axis=1)
        weight = tl.sum(tl.where(same, weight_of[None, :], 0.0), axis=1)
        count = tl.maximum(tl.sum(same.to(tl.int32), axis=1), 1)
        known = tl.minimum(tl.maximum(lengths + depth, 1), 64)
        log_odds = (
            one
            + match * tl.log2(known.to(tl.float64))
            + share * tl.log((weight + least) / (tl.maximum(parent_weight - weight, 0.0) + 0.5))
            + support * tl.log2(count.to(tl.float64))
            + age * log_age / 10.0
        )
        edge = log_sigmoid(tl.minimum(tl.maximum(log_odds, -limit), limit))
        # A column takes its leader's log probabilities, so that its sum is the node's value.
        value += tl.sum(tl.where(leader[:, None] == column[None, :], edge[None, :], 0.0), axis=1)
        to = request * DEPTH * COUNT + depth * COUNT + column
        parent = leader_above + (depth - 1) * COUNT
        if depth == 0:
            parent = tl.zeros([COUNT_PADDED], tl.int32) + _PADDING
        is_node = exists & (leader == column)
        tl.store(token_ids_ptr + to, token.to(tl.int64), mask=column < COUNT)
        tl.store(parents_ptr + to, parent.to(tl.int64), mask=column < COUNT)
        tl.store(values_ptr + to, tl.where(is_node, value, float("-inf")).to(tl.float32), mask=column < COUNT)
        tl.store(depths_ptr + to, tl.zeros([COUNT_PADDED], tl.int64) + (depth + 1), mask=column < COUNT)
        leader_above, parent_weight = leader, weight


def continuations(
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    lens: torch.Tensor,
    *,
    min_match: int,
    max_match: int,
    max_candidates: int,
    draft_depth: int,
    table: torch.Tensor,
    kept: tuple[torch.Tensor, torch.Tensor],
) -> DraftPool:
    """Find the best matches and build the pool of their continuations, in two launches.

    The references are ``best_matches`` and ``prefix_tree`` of ``proposers.lookup.device``.

    Args:
        token_ids, slots, lens, min_match, max_match: as of ``match_keys``; a request with slot -1 has no matches.
        max_candidates: matches per request.
        draft_depth: tokens of a continuation.
        table: float64 on the device; see ``proposers.lookup.device.kernel_table``.
        kept: buffers of at least ``num_reqs`` rows.  int64 ``[..., draft_depth * max_candidates]`` becomes the pool's
            token ids; lengths and ages of the matches are written to int32 ``[..., 2, max_candidates]``.
    """
    num_reqs, max_len, device = slots.shape[0], token_ids.shape[1], token_ids.device
    num_blocks = triton.cdiv(max_len, _BLOCK)
    best = torch.empty(num_reqs, num_blocks, max_candidates, dtype=torch.int32, device=device)
    count_padded = triton.next_power_of_2(max_candidates)
    _best_matches_kernel[(num_reqs, num_blocks)](
        token_ids, slots, lens, best, max_len, MIN_MATCH=min_match, MAX_MATCH=max_match, COUNT=max_candidates,
        COUNT_PADDED=count_padded, BLOCK=_BLOCK,
    )  # fmt: skip
    shape = (num_reqs, draft_depth * max_candidates)
    parents, depths = (torch.empty(shape, dtype=torch.int64, device=device) for _ in range(2))
    tokens, matches = kept[0][:num_reqs], kept[1]
    values = torch.empty(shape, dtype=torch.float32, device=device)
    _prefix_tree_kernel[(num_reqs,)](
        best, num_blocks * max_candidates, token_ids, slots, lens, max_len, table, tokens, parents, values, depths,
        matches,
        DEPTH=draft_depth, COUNT=max_candidates, COUNT_PADDED=count_padded,
        BEST_PADDED=triton.next_power_of_2(num_blocks * max_candidates),
    )  # fmt: skip
    return DraftPool(tokens, parents, values, depths, size=shape[1])
