"""Tree attention over vLLM's paged KV cache in Triton (CUDA; on a CPU under Triton's interpreter).

The operation of ``tree_attention.tree_attention`` (same reference), on pages that keep a token's key and value side by
side (layout ``token``) and with the tree mask packed into words, see ``layout.ancestor_bits``.  For small batches
several programs share a context; a second kernel merges their parts by log-sum-exp.  Grids and shapes depend only on
Python values known on the CPU, so a CUDA graph can capture the launches.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from vllm_specplug.kernels.attention_traits import NO_TRAITS, AttentionTraits
from vllm_specplug.kernels.triton_tiles import (
    add_sinks,
    attend,
    attend_tree,
    count_visible,
    load_queries,
    store_output,
    tile_options,
    trait_options,
)

MAX_SPLITS = 32


@triton.jit
def _attend_context(
    tile, cache, num_visible, slopes, request, kv_head, split, scale, top, total, acc,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, NUM_SPLITS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Attend to this split's share of a request's context, tile by tile.

    Args:
        tile: from ``load_queries``.
        cache: the kernel's arguments from ``cache_ptr`` to ``context_lens_ptr``.
        num_visible: tree keys that each row sees; None where no distance is needed.
        slopes: ALiBi slope of each row; None: none.
    """
    q, _, in_query, _, _, dims, in_head = tile
    cache_ptr, cache_block_stride, cache_head_stride, cache_slot_stride = cache[:4]
    block_table_ptr, block_table_stride, context_lens_ptr = cache[4:]
    context = tl.load(context_lens_ptr + request)
    # Plain arithmetic: each function of Triton's library costs the interpreter milliseconds.
    tiles = (context + BLOCK_N - 1) // BLOCK_N
    begin = 0
    if WINDOW > 0:
        # A row sees itself, so none sees more.  vLLM may have freed the pages before.
        begin = tl.maximum(context + 1 - WINDOW, 0)
    first = begin // BLOCK_N
    share = (tiles - first + NUM_SPLITS - 1) // NUM_SPLITS
    for number in range(first + split * share, tl.minimum(first + (split + 1) * share, tiles)):
        position = number * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = position < context
        if WINDOW > 0:
            valid &= position >= begin
        page = tl.load(block_table_ptr + request * block_table_stride + position // PAGE, mask=valid, other=0)
        slot = (
            cache_ptr
            + page.to(tl.int64) * cache_block_stride
            + kv_head * cache_head_stride
            + (position % PAGE) * cache_slot_stride
        )
        # Never-written slots may hold NaN, and 0 * NaN is NaN: masked loads.
        loads = valid[:, None] & in_head[None, :]
        k = tl.load(slot[:, None] + dims[None, :], mask=loads, other=0.0)
        v = tl.load(slot[:, None] + HEAD_SIZE + dims[None, :], mask=loads, other=0.0)
        visible = valid[None, :] & in_query[:, None]
        distance = None
        if WINDOW > 0 or slopes is not None:
            distance = num_visible[:, None] + (context - 1 - position)[None, :]
            if WINDOW > 0:
                visible &= distance < WINDOW
        top, total, acc = attend(q, k, v, visible, distance, slopes, scale, top, total, acc, SOFT_CAP, PRECISION, WIDEN)
    return top, total, acc


@triton.jit
def _tree_attention_kernel(
    query_ptr, query_stride, query_head_stride,
    output_ptr, output_stride, output_head_stride,
    cache_ptr, cache_block_stride, cache_head_stride, cache_slot_stride,
    block_table_ptr, block_table_stride,
    context_lens_ptr, query_start_ptr, query_lens_ptr,
    key_ptr, key_stride, key_head_stride,
    value_ptr, value_stride, value_head_stride,
    tree_start_ptr, tree_lens_ptr,
    bits_ptr, bits_stride, bits_row_stride,
    parts_ptr, tops_ptr, totals_ptr,
    sinks_ptr, slopes_ptr, scale, num_heads, max_query_len, num_row_blocks,
    WINDOW: tl.constexpr, TREE_WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    NUM_SPLITS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Attend from one tile of queries to one split of the context; the last split adds the tree."""
    request = tl.program_id(0) // num_row_blocks
    row_block = tl.program_id(0) % num_row_blocks
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    query_len = tl.load(query_lens_ptr + request)
    if row_block * BLOCK_M >= query_len * GROUP:
        return
    tile = load_queries(
        query_ptr, query_stride, query_head_stride, query_start_ptr, request, kv_head, row_block, query_len,
        GROUP, HEAD_SIZE, HEAD_PADDED, BLOCK_M,
    )  # fmt: skip
    cache = (
        cache_ptr, cache_block_stride, cache_head_stride, cache_slot_stride,
        block_table_ptr, block_table_stride, context_lens_ptr,
    )  # fmt: skip
    tree = (
        key_ptr, key_stride, key_head_stride, value_ptr, value_stride, value_head_stride,
        tree_start_ptr, tree_lens_ptr, bits_ptr, bits_stride, bits_row_stride,
    )  # fmt: skip

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, HEAD_PADDED], 0.0, tl.float32)
    num_visible = None
    if WINDOW > 0 or slopes_ptr is not None:
        num_visible = count_visible(tile, tree, request, BLOCK_M)
    slopes = None
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + tile[4], mask=tile[2], other=0.0).to(tl.float32)
    top, total, acc = _attend_context(
        tile, cache, num_visible, slopes, request, kv_head, split, scale, top, total, acc,
        WINDOW, SOFT_CAP, NUM_SPLITS, HEAD_SIZE, PAGE, BLOCK_N, PRECISION, WIDEN,
    )  # fmt: skip
    if split == NUM_SPLITS - 1:  # the split with the fewest context tiles
        top, total, acc = attend_tree(
            tile, tree, num_visible, slopes, request, kv_head, scale, top, total, acc,
            TREE_WINDOW, SOFT_CAP, BLOCK_N, PRECISION, WIDEN,
        )  # fmt: skip
        if sinks_ptr is not None:
            top, total, acc = add_sinks(sinks_ptr, tile, top, total, acc)

    if NUM_SPLITS == 1:
        store_output(output_ptr, output_stride, output_head_stride, tile, total, acc)
    else:
        _, row, in_query, _, head, dims, in_head = tile
        part = ((request * max_query_len + row).to(tl.int64) * num_heads + head) * NUM_SPLITS + split
        addresses = parts_ptr + part[:, None] * HEAD_SIZE + dims[None, :]
        tl.store(addresses, acc, mask=in_query[:, None] & in_head[None, :])
        tl.store(tops_ptr + part, top, mask=in_query)
        tl.store(totals_ptr + part, total, mask=in_query)


@triton.jit
def _merge_kernel(
    output_ptr, output_stride, output_head_stride, query_start_ptr, query_lens_ptr,
    parts_ptr, tops_ptr, totals_ptr, num_heads, max_query_len,
    NUM_SPLITS: tl.constexpr, SPLITS_PADDED: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one query row and head."""
    request = tl.program_id(0) // max_query_len
    row = tl.program_id(0) % max_query_len
    head = tl.program_id(1)
    if row >= tl.load(query_lens_ptr + request):
        return
    splits = tl.arange(0, SPLITS_PADDED)
    valid = splits < NUM_SPLITS
    dims = tl.arange(0, HEAD_PADDED)
    part = ((request * max_query_len + row).to(tl.int64) * num_heads + head) * NUM_SPLITS + splits
    tops = tl.load(tops_ptr + part, mask=valid, other=float("-inf"))
    totals = tl.load(totals_ptr + part, mask=valid, other=0.0)
    parts = tl.load(
        parts_ptr + part[:, None] * HEAD_SIZE + dims[None, :],
        mask=valid[:, None] & (dims < HEAD_SIZE)[None, :],
        other=0.0,
    )
    top = tl.max(tops, axis=0)
    weights = tl.exp(tops - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(totals * weights, axis=0)
    result = tl.sum(parts * weights[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    flat = (tl.load(query_start_ptr + request) + row).to(tl.int64)
    addresses = output_ptr + flat * output_stride + head * output_head_stride + dims
    tl.store(addresses, result.to(output_ptr.dtype.element_ty), mask=dims < HEAD_SIZE)


def tree_attention(
    query: torch.Tensor,
    output: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_start: torch.Tensor,
    query_lens: torch.Tensor,
    tree_key: torch.Tensor,
    tree_value: torch.Tensor,
    tree_start: torch.Tensor,
    tree_lens: torch.Tensor,
    bits: torch.Tensor,
    scale: float,
    *,
    max_query_len: int,
    max_context_len: int | None = None,
    num_splits: int | None = None,
    traits: AttentionTraits = NO_TRAITS,
) -> None:
    """Attend from every query row to its request's whole context and to the tree rows that its mask shows.

    A row without visible keys gets zeros.  (This function is long because two thirds of it list its arguments.)

    Args:
        query: float32, float16 or bfloat16 ``[num_tokens, num_heads, head_size]``; any strides but the last.
        output: as ``query``; only the rows that ``query_start`` and ``query_lens`` name are written.
        kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``, a token's key and value side by side; any
            strides but the last.
        block_table: int32 ``[num_reqs, max_blocks]``; entries behind the context are never read.
        context_lens: int32 ``[num_reqs]``; cached tokens, visible to every row of the request.
        query_start, query_lens: int32 ``[num_reqs]``; the request's rows in ``query``; 0 rows leave the request out.
        tree_key, tree_value: ``[num_tree_rows, num_kv_heads, head_size]``; any strides but the last.
        tree_start, tree_lens: int32 ``[num_reqs]``; the request's rows there.
        bits: int64 ``[num_reqs, >= max_query_len, num_words]``; see ``layout.ancestor_bits``.
        scale: factor of the scores.
        max_query_len: upper bound of ``query_lens``.
        max_context_len: upper bound of ``context_lens``; only limits the number of splits.
        num_splits: programs that share one context; by default as many as fill the device.
        traits: see ``attention_traits``; sinks of any float dtype.  With a window, each row sees a tree key.
    """
    num_heads, head_size = query.shape[1:]
    _, num_kv_heads, page, _ = kv_cache.shape
    group = num_heads // num_kv_heads
    num_reqs = context_lens.shape[0]
    tiles = tile_options(query, max_query_len * group)
    num_row_blocks = triton.cdiv(max_query_len * group, tiles["BLOCK_M"])
    if num_splits is None:
        num_programs = num_reqs * num_row_blocks * num_kv_heads
        longest = min((n for n in (max_context_len, traits.window) if n), default=None)
        num_splits = _num_splits(query.device, num_programs, longest, tiles["BLOCK_N"])
    parts = tops = totals = query  # never read without splits
    if num_splits > 1:
        tops = torch.empty(num_reqs, max_query_len, num_heads, num_splits, dtype=torch.float32, device=query.device)
        totals = torch.empty_like(tops)
        parts = tops.new_empty(*tops.shape, head_size)
    _tree_attention_kernel[(num_reqs * num_row_blocks, num_kv_heads, num_splits)](
        query, query.stride(0), query.stride(1),
        output, output.stride(0), output.stride(1),
        kv_cache, kv_cache.stride(0), kv_cache.stride(1), kv_cache.stride(2),
        block_table, block_table.stride(0),
        context_lens, query_start, query_lens,
        tree_key, tree_key.stride(0), tree_key.stride(1),
        tree_value, tree_value.stride(0), tree_value.stride(1),
        tree_start, tree_lens,
        bits, bits.stride(0), bits.stride(1),
        parts, tops, totals,
        scale=scale, num_heads=num_heads, max_query_len=max_query_len, num_row_blocks=num_row_blocks,
        **trait_options(traits, bits), NUM_SPLITS=num_splits, GROUP=group, PAGE=page, **tiles,
    )  # fmt: skip
    if num_splits > 1:
        _merge_kernel[(num_reqs * max_query_len, num_heads)](
            output, output.stride(0), output.stride(1), query_start, query_lens,
            parts, tops, totals, num_heads, max_query_len,
            NUM_SPLITS=num_splits, SPLITS_PADDED=triton.next_power_of_2(num_splits),
            HEAD_SIZE=head_size, HEAD_PADDED=tiles["HEAD_PADDED"], num_warps=1,
        )  # fmt: skip


def _num_splits(device: torch.device, num_programs: int, max_context_len: int | None, block_n: int) -> int:
    """Return how many splits give every multiprocessor two programs: a power of two, to compile few variants."""
    wanted = 2 * _num_processors(device) // max(num_programs, 1)
    if max_context_len is not None:
        wanted = min(wanted, max_context_len // (2 * block_n))
    wanted = max(1, min(wanted, MAX_SPLITS))
    return 1 << (wanted.bit_length() - 1)


@functools.cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
