"""Growth of draft trees in Triton: the children of drafted nodes, one level of the pool, and the tree chosen from it.

Each replaces many launches of the named torch functions by one or two; these functions are its reference in the tests:

=================== ===============================================
``likeliest``       ``core.draft_sampling.likeliest``
``grow_level``      ``core.growth.grow_level``; ``Beam.mask`` in words
``rerank_draft``    ``core.pruning.rerank_draft``
``start_levels``    torch operations in ``tests/v2/test_growth``
=================== ===============================================

Ties go to the lower index, as there.  Values and their order are packed into one integer each, so that a single maximum
finds the best and the tie's winner.  No value is read back and no shape depends on device data.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from vllm_specplug.core.draft_sampling import Children
from vllm_specplug.core.growth import GrowthOps
from vllm_specplug.core.layout import WORD_BITS
from vllm_specplug.core.pool import NEVER, Beam, DraftPool
from vllm_specplug.types import PADDING, Draft, TokenTree

_PADDING = tl.constexpr(PADDING)
_WORD = tl.constexpr(WORD_BITS)
#: Below every packed value.
_NOTHING = tl.constexpr(-(1 << 63))
#: Logits that one program looks at.
_CHUNK = 4096


@triton.jit
def pack(values, index):
    """Pack float32 values and indices below 2^31 into int64: the order is by value, then from the lower index up."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)  # -0 counts as 0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    return (ordered << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def unpack(packed):
    """Return the values and indices that ``pack`` was given."""
    ordered = (packed >> 32).to(tl.int32)
    values = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return values, 0x7FFFFFFF - (packed & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _best_of_chunk_kernel(
    logits_ptr, stride, best_ptr, tops_ptr, sums_ptr, vocab, num_chunks, TOP_K: tl.constexpr, CHUNK: tl.constexpr
):
    """Find the best logits of a chunk, and its part of the log-sum-exp."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = index < vocab
    x = tl.load(logits_ptr + row * stride + index, mask=inside, other=float("-inf")).to(tl.float32)
    top = tl.max(x, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    tl.store(tops_ptr + row * num_chunks + chunk, top)
    tl.store(sums_ptr + row * num_chunks + chunk, tl.sum(tl.where(inside, tl.exp(x - shift), 0.0), axis=0))
    packed = tl.where(inside, pack(x, index), _NOTHING)
    for i in range(TOP_K):
        best = tl.max(packed, axis=0)
        tl.store(best_ptr + (row * num_chunks + chunk) * TOP_K + i, best)
        packed = tl.where(packed == best, _NOTHING, packed)


@triton.jit
def _best_of_row_kernel(
    best_ptr, tops_ptr, sums_ptr, draft_ids_ptr, token_ids_ptr, log_probs_ptr, num_chunks,
    TOP_K: tl.constexpr, CHUNKS_PADDED: tl.constexpr, BEST_PADDED: tl.constexpr,
):  # fmt: skip
    """Merge the chunks of a row."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS_PADDED)
    tops = tl.load(tops_ptr + row * num_chunks + chunk, mask=chunk < num_chunks, other=float("-inf"))
    sums = tl.load(sums_ptr + row * num_chunks + chunk, mask=chunk < num_chunks, other=0.0)
    top = tl.max(tops, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    log_total = tl.log(tl.sum(sums * tl.exp(tops - shift), axis=0))
    place = tl.arange(0, BEST_PADDED)
    count = num_chunks * TOP_K
    packed = tl.load(best_ptr + row * count + place, mask=place < count, other=_NOTHING)
    for i in range(TOP_K):
        best = tl.max(packed, axis=0)
        value, token = unpack(best)
        token = token.to(tl.int64)
        if draft_ids_ptr is not None:
            token = tl.load(draft_ids_ptr + token)
        tl.store(token_ids_ptr + row * TOP_K + i, token)
        tl.store(log_probs_ptr + row * TOP_K + i, value - top - log_total)
        packed = tl.where(packed == best, _NOTHING, packed)


def likeliest(logits: torch.Tensor, draft_top_k: int, draft_ids: torch.Tensor | None = None) -> Children:
    """Choose the likeliest tokens: log-softmax in float32 and the best of it, in two launches.

    Args:
        logits: float ``[num_rows, draft_vocab]``, contiguous rows, at least ``draft_top_k`` of them finite or -inf.
        draft_top_k: children per row.
        draft_ids: int64 ``[draft_vocab]``; target id of each draft id; None if both vocabularies are the same.
    """
    num_rows, vocab = logits.shape
    num_chunks = triton.cdiv(vocab, _CHUNK)
    best = torch.empty(num_rows, num_chunks, draft_top_k, dtype=torch.int64, device=logits.device)
    tops = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(tops)
    _best_of_chunk_kernel[(num_rows, num_chunks)](
        logits, logits.stride(0), best, tops, sums, vocab, num_chunks,
        TOP_K=draft_top_k, CHUNK=min(_CHUNK, triton.next_power_of_2(max(vocab, draft_top_k))), num_warps=8,
    )  # fmt: skip
    token_ids = torch.empty(num_rows, draft_top_k, dtype=torch.int64, device=logits.device)
    log_probs = torch.empty(num_rows, draft_top_k, dtype=torch.float32, device=logits.device)
    _best_of_row_kernel[(num_rows,)](
        best, tops, sums, draft_ids, token_ids, log_probs, num_chunks,
        TOP_K=draft_top_k, CHUNKS_PADDED=triton.next_power_of_2(num_chunks),
        BEST_PADDED=triton.next_power_of_2(num_chunks * draft_top_k),
    )  # fmt: skip
    return Children(token_ids, log_probs)


def new_pool(num_reqs: int, draft_top_k: int, draft_depth: int, device: torch.device | str) -> DraftPool:
    """Allocate a pool as ``core.pool.new_pool``, without values: each column is written before it is read."""
    shape = (num_reqs, draft_top_k + (draft_depth - 1) * draft_top_k**2)
    ids = [torch.empty(shape, dtype=torch.int64, device=device) for _ in range(3)]
    return DraftPool(ids[0], ids[1], torch.empty(shape, dtype=torch.float32, device=device), ids[2])


@triton.jit(do_not_specialize=("pool_width", "start", "depth", "num_fed", "num_before"))
def _grow_level_kernel(
    token_ids_ptr, log_probs_ptr, pool_token_ids_ptr, pool_parents_ptr, pool_values_ptr, pool_depths_ptr, pool_width,
    start, depth, fed_nodes_ptr, fed_bits_ptr, num_fed, num_before,
    nodes_ptr, beam_token_ids_ptr, beam_values_ptr, sources_ptr, bits_ptr,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr, IS_FIRST: tl.constexpr,
    IS_LAST: tl.constexpr, FED_WORDS: tl.constexpr, NUM_WORDS: tl.constexpr,
):  # fmt: skip
    """Append the children of a request's fed nodes and pick the best of them to feed next."""
    request = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH_PADDED)
    inside = column < WIDTH
    fed = column // TOP_K
    token = tl.load(token_ids_ptr + request * WIDTH + column, mask=inside, other=_PADDING)
    value = tl.load(log_probs_ptr + request * WIDTH + column, mask=inside, other=float("-inf")).to(tl.float32)
    value = tl.where(value == value, tl.where(value > 0.0, 0.0, value), float("-inf"))
    pool = request * pool_width
    parent = tl.full([WIDTH_PADDED], _PADDING, tl.int64)
    if not IS_FIRST:
        parent = tl.load(fed_nodes_ptr + request * num_fed + fed, mask=inside, other=0)
        value += tl.load(pool_values_ptr + pool + parent, mask=inside, other=float("-inf"))
    new = pool + start + column
    tl.store(pool_token_ids_ptr + new, token, mask=inside)
    tl.store(pool_parents_ptr + new, parent, mask=inside)
    tl.store(pool_values_ptr + new, value, mask=inside)
    tl.store(pool_depths_ptr + new, tl.zeros([WIDTH_PADDED], tl.int64) + depth, mask=inside)
    if not IS_LAST:
        chosen = inside
        if WIDTH > TOP_K:
            packed = tl.where(inside, pack(value, column), _NOTHING)
            chosen = column < 0
            for _ in range(TOP_K):
                best = packed == tl.max(packed, axis=0)
                chosen = chosen | best
                packed = tl.where(best, _NOTHING, packed)
        place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1  # in ascending order of the pool
        to = request * TOP_K + place
        tl.store(nodes_ptr + to, (start + column).to(tl.int64), mask=chosen)
        tl.store(beam_token_ids_ptr + to, token.to(tl.int32), mask=chosen)
        tl.store(beam_values_ptr + to, value, mask=chosen)
        tl.store(sources_ptr + to, request * num_fed + fed, mask=chosen)
        own = num_before + place
        for word in range(NUM_WORDS):
            bits = tl.zeros([WIDTH_PADDED], tl.int64)
            if word < FED_WORDS:
                bits = tl.load(fed_bits_ptr + (request * num_fed + fed) * FED_WORDS + word, mask=chosen, other=0)
            one = tl.full([WIDTH_PADDED], 1, tl.int64) << (own % _WORD).to(tl.int64)
            bits = tl.where(own // _WORD == word, bits | one, bits)
            tl.store(bits_ptr + to * NUM_WORDS + word, bits, mask=chosen)


def grow_level(
    pool: DraftPool, beam: Beam | None, token_ids: torch.Tensor, log_probs: torch.Tensor, _num_nodes: int
) -> Beam | None:
    """Append one level to the pool, in place, and pick what to feed next, in one launch.

    Arguments and result as of the reference, with ``draft_top_k`` fed nodes from the second level on.  Token ids and
    log probabilities are contiguous.  In the result, token ids are int32 and the mask is packed as by
    ``layout.ancestor_bits``.
    """
    (num_reqs, pool_width), top_k, device = pool.token_ids.shape, token_ids.shape[1], token_ids.device
    num_fed = token_ids.shape[0] // num_reqs
    width, start = num_fed * top_k, pool.size
    if start + width > pool_width:
        raise ValueError(f"the pool holds {pool_width} nodes, {start + width} would be drafted")
    pool.num_levels += 1
    pool.level_start, pool.size = start, start + width
    num_before = (pool.num_levels - 1) * top_k
    fed_words = 0 if beam is None else beam.mask.shape[2]
    shape, num_words = (num_reqs, top_k), triton.cdiv(num_before + top_k, WORD_BITS)
    nodes, sources = (torch.empty(shape, dtype=torch.int64, device=device) for _ in range(2))
    beam_token_ids, values = torch.empty_like(nodes, dtype=torch.int32), torch.empty_like(nodes, dtype=torch.float32)
    bits = torch.empty(*shape, num_words, dtype=torch.int64, device=device)
    is_last = pool.size == pool_width
    _grow_level_kernel[(num_reqs,)](
        token_ids, log_probs, pool.token_ids, pool.parents, pool.log_values, pool.depths, pool_width,
        start, pool.num_levels, nodes if beam is None else beam.nodes, bits if beam is None else beam.mask, num_fed,
        num_before, nodes, beam_token_ids, values, sources, bits,
        TOP_K=top_k, WIDTH=width, WIDTH_PADDED=triton.next_power_of_2(width), IS_FIRST=beam is None, IS_LAST=is_last,
        FED_WORDS=fed_words, NUM_WORDS=num_words,
    )  # fmt: skip
    return None if is_last else Beam(nodes, beam_token_ids, values, sources.flatten(), bits)


@triton.jit
def _rerank_kernel(
    pool_token_ids_ptr, pool_parents_ptr, pool_values_ptr, pool_depths_ptr, pool_width, size, roots_ptr, floor,
    chosen_before_ptr, token_ids_ptr, parents_ptr, depths_ptr, log_values_ptr, num_rows_ptr, index_ptr,
    NUM_NODES: tl.constexpr, ROWS_PADDED: tl.constexpr, SIZE_PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Choose the tree of one request."""
    request = tl.program_id(0).to(tl.int64)
    pool = request * pool_width
    node = tl.arange(0, SIZE_PADDED)
    inside = node < size
    value = tl.load(pool_values_ptr + pool + node, mask=inside, other=float("-inf"))
    rank = tl.zeros([SIZE_PADDED], tl.int32)
    for first in range(0, size, TILE):
        other = first + tl.arange(0, TILE)
        others = tl.load(pool_values_ptr + pool + other, mask=other < size, other=float("-inf"))
        same = (others[None, :] == value[:, None]) & (other[None, :] < node[:, None])
        before = (others[None, :] > value[:, None]) | same
        rank += tl.sum((before & (other < size)[None, :]).to(tl.int32), axis=1)
    chosen = inside & (rank < NUM_NODES) & (value > float("-inf")) & (value >= floor)
    row = tl.cumsum(chosen.to(tl.int32), axis=0)
    count = tl.sum(chosen.to(tl.int32), axis=0)
    tl.store(chosen_before_ptr + pool + node, row, mask=inside)
    tl.debug_barrier()
    parent = tl.load(pool_parents_ptr + pool + node, mask=chosen, other=_PADDING)
    parent_row = tl.load(chosen_before_ptr + pool + parent, mask=chosen & (parent >= 0), other=0)
    width = NUM_NODES + 1
    to = request * width + row
    tl.store(token_ids_ptr + to, tl.load(pool_token_ids_ptr + pool + node, mask=chosen, other=0), mask=chosen)
    tl.store(parents_ptr + to, parent_row.to(tl.int64), mask=chosen)
    tl.store(depths_ptr + to, tl.load(pool_depths_ptr + pool + node, mask=chosen, other=0), mask=chosen)
    tl.store(log_values_ptr + to, value, mask=chosen)
    tl.store(index_ptr + to, node.to(tl.int64), mask=chosen)
    rest = tl.arange(0, ROWS_PADDED)
    padding = (rest < width) & ((rest == 0) | (rest > count))
    to = request * width + rest
    nothing = tl.full([ROWS_PADDED], _PADDING, tl.int64)
    tl.store(token_ids_ptr + to, tl.where(rest == 0, tl.load(roots_ptr + request), nothing), mask=padding)
    tl.store(parents_ptr + to, nothing, mask=padding)
    tl.store(depths_ptr + to, tl.zeros([ROWS_PADDED], tl.int64), mask=padding)
    tl.store(log_values_ptr + to, tl.where(rest == 0, 0.0, float("-inf")), mask=padding)
    tl.store(index_ptr + to, nothing, mask=padding)
    tl.store(num_rows_ptr + request, (count + 1).to(tl.int64))


def rerank_draft(
    pool: DraftPool, root_token_ids: torch.Tensor, num_nodes: int, min_node_value: float = 0.0
) -> tuple[Draft, torch.Tensor]:
    """Keep the best ``num_nodes`` drafted nodes as a tree, in one launch; arguments and result as of the reference."""
    (num_reqs, pool_width), device = pool.token_ids.shape, pool.token_ids.device
    shape = (num_reqs, num_nodes + 1)
    token_ids, parents, depths, index = (torch.empty(shape, dtype=torch.int64, device=device) for _ in range(4))
    log_values = torch.empty(shape, dtype=torch.float32, device=device)
    num_rows = torch.empty(num_reqs, dtype=torch.int64, device=device)
    size_padded = triton.next_power_of_2(pool.size)
    _rerank_kernel[(num_reqs,)](
        pool.token_ids, pool.parents, pool.log_values, pool.depths, pool_width, pool.size, root_token_ids,
        math.log(min_node_value) if min_node_value > 0 else NEVER,
        torch.empty(num_reqs, pool_width, dtype=torch.int32, device=device),
        token_ids, parents, depths, log_values, num_rows, index,
        NUM_NODES=num_nodes, ROWS_PADDED=triton.next_power_of_2(num_nodes + 1), SIZE_PADDED=size_padded,
        TILE=max(1, min(size_padded, 4096 // size_padded)), num_warps=8 if size_padded >= 512 else 4,
    )  # fmt: skip
    return Draft(TokenTree(token_ids, parents, depths, num_rows), log_values), index


@triton.jit(do_not_specialize=("num_reqs", "max_position"))
def _start_levels_kernel(
    slots_ptr, positions_ptr, context_lens_ptr, level_positions_ptr, num_reqs, max_position,
    NUM_LEVELS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    position = tl.load(positions_ptr + request)
    used = tl.load(slots_ptr + request) >= 0
    tl.store(context_lens_ptr + request, tl.where(used, position + 1, 0).to(tl.int32))
    column = tl.arange(0, WIDTH_PADDED)
    for level in range(NUM_LEVELS):
        here = tl.zeros([WIDTH_PADDED], tl.int64) + tl.minimum(position + level + 1, max_position)
        tl.store(level_positions_ptr + (level * num_reqs + request) * WIDTH + column, here, mask=column < WIDTH)


def start_levels(
    slots: torch.Tensor, positions: torch.Tensor, num_levels: int, width: int, max_position: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute what the drafter's levels read of each request.

    Args:
        slots: int ``[num_reqs]``; -1: the request is not used.
        positions: int64 ``[num_reqs]``; of each request's newest row.
        num_levels: forwards of the drafter.
        width: nodes of a request in a level.
        max_position: no position is above.

    Returns:
        Context lengths int32 ``[num_reqs]``, 0 for unused requests, and the nodes' positions int64
        ``[num_levels, num_reqs * width]``.
    """
    num_reqs = slots.shape[0]
    context_lens = torch.empty(num_reqs, dtype=torch.int32, device=slots.device)
    level_positions = torch.empty(num_levels, num_reqs * width, dtype=torch.int64, device=slots.device)
    _start_levels_kernel[(num_reqs,)](
        slots, positions, context_lens, level_positions, num_reqs, max_position,
        NUM_LEVELS=num_levels, WIDTH=width, WIDTH_PADDED=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return context_lens, level_positions


#: ``core.growth.GrowthOps`` of kernels.
KERNELS = GrowthOps(new_pool, grow_level, rerank_draft, static=True)
