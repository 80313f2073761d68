"""Prompt lookup in Triton: the search for earlier matches, and the tree of their continuations.

The references are in ``tests/doubles/lookup_reference``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_specplug.core.pool import DraftPool
from vllm_specplug.types import PADDING

_BLOCK = 1024
_PADDING = tl.constexpr(PADDING)


@triton.jit
def _match_lengths(store, positions, matches, own, end, MAX_MATCH: tl.constexpr, BLOCK: tl.constexpr):
    """Count how many tokens of a store up to and including each position equal the request's last ones, up to ``end``.

    Only where ``matches`` is true; else 0.
    """
    lengths = tl.zeros([BLOCK], tl.int32)
    back = 0
    # Few positions match: most programs read their tokens only once.
    while (back < MAX_MATCH) & (back <= end) & (tl.max(matches.to(tl.int32), axis=0) > 0):
        here = tl.load(store + positions - back, mask=matches & (positions >= back), other=-1)
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
    lengths = _match_lengths(own, positions, positions < end, own, end, MAX_MATCH, BLOCK)
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
    tokens_ptr, slots_ptr, lens_ptr, namespaces_ptr, best_ptr, max_len, span, traffic_ptr, state_ptr, capacity,
    owners_ptr, num_own,
    MIN_MATCH: tl.constexpr, MAX_MATCH: tl.constexpr, COUNT: tl.constexpr, COUNT_PADDED: tl.constexpr,
    MIN_TRAFFIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the best matches in one block of positions: the first ``num_own`` blocks are the request's, the others those
    of traffic."""
    request = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    own_best = best_ptr + (request * tl.num_programs(1) + block) * COUNT
    slot = tl.load(slots_ptr + request).to(tl.int64)
    end = -1
    if slot >= 0:
        end = tl.load(lens_ptr + slot) - 1
    own = tokens_ptr + tl.maximum(slot, 0) * max_len
    keys = tl.zeros([BLOCK], tl.int32)
    if block < num_own:
        positions = block * BLOCK + tl.arange(0, BLOCK)
        lengths = _match_lengths(own, positions, positions < end, own, end, MAX_MATCH, BLOCK)
        keys = tl.where(lengths >= MIN_MATCH, lengths * 2 * span + span + positions, 0)
    elif (block - num_own) * BLOCK <= tl.load(state_ptr + 1):  # else nothing is stored there yet
        positions = (block - num_own) * BLOCK + tl.arange(0, BLOCK)
        valid = (positions > 0) & (positions < capacity)
        lengths = _match_lengths(traffic_ptr, positions, valid, own, end, MAX_MATCH, BLOCK)
        found = lengths >= MIN_TRAFFIC
        # The last token of an answer has no successor.
        found = found & (tl.load(traffic_ptr + positions + 1, mask=found, other=-1) >= 0)
        mine = tl.load(namespaces_ptr + tl.maximum(slot, 0))
        found = found & (tl.load(owners_ptr + positions, mask=found, other=0) == mine)
        age = (tl.load(state_ptr) - positions + capacity) % capacity
        keys = tl.where(found, lengths * 2 * span + capacity - age, 0)
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
def _read_keys(keys, span, end, cursor, capacity):
    """Return length, age and position of each match, and whether it is in the request itself."""
    rest = keys % (2 * span)
    is_own = rest >= span
    # Of a match in traffic, ``rest`` is the capacity less the age.
    ages = tl.maximum(tl.where(is_own, end - (rest - span), capacity - rest), 1)
    positions = tl.where(is_own, rest - span, (cursor - ages - 1 + capacity) % capacity + 1)
    return keys // (2 * span), ages, positions, is_own


@triton.jit
def _log_odds(weights, length, share, count, log_age):
    """Compute the log odds of nodes from their features, see ``proposers.lookup.prefix_tree``."""
    length = tl.minimum(tl.maximum(length, 1), 64)
    return (
        tl.load(weights)
        + tl.load(weights + 1) * tl.log2(length.to(tl.float64))
        + tl.load(weights + 2) * share
        + tl.load(weights + 3) * tl.log2(count.to(tl.float64))
        + tl.load(weights + 4) * log_age / 10.0
    )


@triton.jit
def _prefix_tree_kernel(
    best_ptr, num_best, tokens_ptr, slots_ptr, lens_ptr, max_len, span, traffic_ptr, state_ptr, capacity, table_ptr,
    token_ids_ptr, parents_ptr, values_ptr, depths_ptr, matches_ptr,
    DEPTH: tl.constexpr, COUNT: tl.constexpr, COUNT_PADDED: tl.constexpr, BEST_PADDED: tl.constexpr,
    NUM_FEATURES: tl.constexpr,
):  # fmt: skip
    """Merge the matches of a request's blocks and build the pool of their continuations."""
    request = tl.program_id(0).to(tl.int64)
    slot = tl.maximum(tl.load(slots_ptr + request).to(tl.int64), 0)
    column = tl.arange(0, COUNT_PADDED)
    place = tl.arange(0, BEST_PADDED)
    candidates = tl.load(best_ptr + request * num_best + place, mask=place < num_best, other=0)
    keys = _largest(candidates, column, COUNT, COUNT_PADDED)
    end, cursor = tl.load(lens_ptr + slot) - 1, tl.load(state_ptr)
    lengths, ages, positions, is_own = _read_keys(keys, span, end, cursor, capacity)
    exists = lengths > 0
    matches = matches_ptr + request * 3 * COUNT + column
    tl.store(matches, lengths, mask=column < COUNT)
    tl.store(matches + COUNT, ages, mask=column < COUNT)
    tl.store(matches + 2 * COUNT, is_own.to(tl.int32), mask=column < COUNT)
    longest = tl.max(lengths, axis=0)
    weight_of = tl.where(exists, tl.exp2((lengths - longest).to(tl.float64)), 0.0)
    parent_weight = tl.sum(weight_of, axis=0) + tl.zeros([COUNT_PADDED], tl.float64)
    same = exists[:, None] & exists[None, :]
    value = tl.zeros([COUNT_PADDED], tl.float64)
    leader_above = column
    log_age = tl.log2((ages + 1).to(tl.float64))
    least, limit = tl.load(table_ptr), tl.load(table_ptr + 1)
    for depth in range(DEPTH):
        # At the end of the known tokens, a repetition continues from its beginning.  An answer in traffic just ends.
        ahead = tl.minimum(positions + 1 + depth % ages, max_len - 1)
        token = tl.load(tokens_ptr + slot * max_len + ahead, mask=exists & is_own, other=-1)
        ahead = positions + 1 + depth
        there = exists & ~is_own & (ahead <= capacity)
        token = tl.where(is_own, token, tl.load(traffic_ptr + ahead, mask=there, other=-1))
        exists = exists & (token >= 0)
        same = same & (token[:, None] == token[None, :]) & exists[:, None] & exists[None, :]
        leader = tl.min(tl.where(same, column[None, :], COUNT_PADDED), axis=1)
        weight = tl.sum(tl.where(same, weight_of[None, :], 0.0), axis=1)
        count = tl.maximum(tl.sum(same.to(tl.int32), axis=1), 1)
        num_own = tl.sum((same & is_own[None, :]).to(tl.int32), axis=1)
        scope = tl.where(num_own == 0, 1, tl.where(num_own < count, 2, 0))  # of ``prefix_tree.SCOPES``
        share = tl.log((weight + least) / (tl.maximum(parent_weight - weight, 0.0) + 0.5))
        log_odds = _log_odds(table_ptr + 2 + scope * NUM_FEATURES, lengths + depth, share, count, log_age)
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


@dataclass(frozen=True)
class LookupBuffers:
    """Tensors that keep their addresses between draft phases, so that CUDA graphs can read and write them.

    Attributes:
        table: float64; see ``proposers.lookup.device_proposer.kernel_table``.
        token_ids: int64 ``[max_num_reqs, draft_depth * max_candidates]``; continuations of the last draft, -1 after
            their ends.
        matches: int32 ``[max_num_reqs, 3, max_candidates]``; of its matches: lengths, ages, 1 if in the request itself.
        traffic: int32 ``[capacity + 1]``; answers of ended requests, as in ``proposers.lookup.index.TrafficIndex``.
        owners: int64, like ``traffic``; the namespaces of these requests.
        state: int32 ``[2]``; last written position of ``traffic``, and the last one that was ever written.
    """

    table: torch.Tensor
    token_ids: torch.Tensor
    matches: torch.Tensor
    traffic: torch.Tensor
    owners: torch.Tensor
    state: torch.Tensor

    @property
    def capacity(self) -> int:
        return self.traffic.shape[0] - 1


def continuations(
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    lens: torch.Tensor,
    namespaces: torch.Tensor,
    *,
    min_match: int,
    max_match: int,
    max_candidates: int,
    draft_depth: int,
    min_traffic_match: int,
    buffers: LookupBuffers,
) -> DraftPool:
    """Find the best matches and build the pool of their continuations, in two launches.

    The references are ``prefix_tree`` of ``tests/doubles/lookup_reference`` for matches in the request itself, and
    ``proposers.lookup.matches.find_matches`` with ``prefix_tree.build_prefix_tree`` for all.

    Args:
        token_ids, slots, lens, min_match, max_match: as of ``match_keys``; a request with slot -1 has no matches.
        namespaces: int64, like ``lens``; matches in traffic of other namespaces are left out.
        max_candidates: matches per request.
        draft_depth: tokens of a continuation.
        min_traffic_match: shorter matches in traffic are ignored.
        buffers: its ``token_ids`` become the pool's.
    """
    num_reqs, max_len, device = slots.shape[0], token_ids.shape[1], token_ids.device
    capacity, num_own = buffers.capacity, triton.cdiv(max_len, _BLOCK)
    num_blocks, span = num_own + triton.cdiv(capacity, _BLOCK), max(max_len, capacity + 1)
    best = torch.empty(num_reqs, num_blocks, max_candidates, dtype=torch.int32, device=device)
    count_padded = triton.next_power_of_2(max_candidates)
    traffic = buffers.traffic, buffers.state, max(capacity, 1)
    _best_matches_kernel[(num_reqs, num_blocks)](
        token_ids, slots, lens, namespaces, best, max_len, span, *traffic, buffers.owners, num_own,
        MIN_MATCH=min_match, MAX_MATCH=max_match, COUNT=max_candidates, COUNT_PADDED=count_padded,
        MIN_TRAFFIC=min_traffic_match, BLOCK=_BLOCK,
    )  # fmt: skip
    shape = (num_reqs, draft_depth * max_candidates)
    parents, depths = (torch.empty(shape, dtype=torch.int64, device=device) for _ in range(2))
    tokens = buffers.token_ids[:num_reqs]
    values = torch.empty(shape, dtype=torch.float32, device=device)
    _prefix_tree_kernel[(num_reqs,)](
        best, num_blocks * max_candidates, token_ids, slots, lens, max_len, span, *traffic, buffers.table, tokens,
        parents, values, depths, buffers.matches, DEPTH=draft_depth, COUNT=max_candidates, COUNT_PADDED=count_padded,
        BEST_PADDED=triton.next_power_of_2(num_blocks * max_candidates), NUM_FEATURES=(len(buffers.table) - 2) // 3,
    )  # fmt: skip
    return DraftPool(tokens, parents, values, depths, size=shape[1])


@triton.jit(do_not_specialize=("slot", "prompt_len"))
def _keep_answer_kernel(
    tokens_ptr, lens_ptr, namespaces_ptr, slot, prompt_len, end, max_len, traffic_ptr, owners_ptr, state_ptr, capacity,
    LONGER_THAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    end = tl.minimum(tl.load(lens_ptr + slot), end)
    own = tokens_ptr + slot.to(tl.int64) * max_len
    count = tl.minimum(end - prompt_len, capacity // 4)
    lane = tl.arange(0, BLOCK)
    if count > LONGER_THAN:
        namespace = tl.load(namespaces_ptr + slot)
        cursor = tl.load(state_ptr)
        written = tl.load(state_ptr + 1)
        if cursor + count + 1 > capacity:  # answers do not wrap around
            for begin in range(cursor + 1, capacity + 1, BLOCK):
                tl.store(traffic_ptr + begin + lane, tl.full([BLOCK], -1, tl.int32), mask=begin + lane <= capacity)
            tl.debug_barrier()
            cursor = cursor * 0
        for begin in range(0, count, BLOCK):
            inside = begin + lane < count
            tokens = tl.load(own + end - count + begin + lane, mask=inside, other=-1)
            tl.store(traffic_ptr + cursor + 1 + begin + lane, tokens, mask=inside)
            tl.store(owners_ptr + cursor + 1 + begin + lane, namespace, mask=inside)
        cursor += count + 1
        tl.store(traffic_ptr + cursor, -1)
        tl.store(state_ptr, cursor)
        tl.store(state_ptr + 1, tl.maximum(written, cursor))


def keep_answer(
    token_ids: torch.Tensor,
    lens: torch.Tensor,
    namespaces: torch.Tensor,
    slot: int,
    prompt_len: int,
    end: int,
    *,
    longer_than: int,
    buffers: LookupBuffers,
) -> None:
    """Store the answer of an ended request in traffic, in one launch; ``TrafficIndex.add`` is the reference.

    Args:
        token_ids, lens: as of ``match_keys``.
        namespaces: int64, like ``lens``.
        slot, prompt_len: of the request.
        end: tokens up to the end of its answer; ``lens`` may count more.
        longer_than: shorter ones are left out.
        buffers: their ``traffic`` is written.
    """
    if buffers.capacity:
        _keep_answer_kernel[(1,)](
            token_ids, lens, namespaces, slot, prompt_len, end, token_ids.shape[1], buffers.traffic, buffers.owners,
            buffers.state, buffers.capacity, LONGER_THAN=longer_than, BLOCK=_BLOCK,
        )  # fmt: skip
