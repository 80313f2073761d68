"""Tree attention over vLLM's paged KV cache in Triton (CUDA; on a CPU under Triton's interpreter).

The operation of ``tree_attention.tree_attention`` (same reference), on pages that keep a token's key and value side by
side (layout ``token``) and with the tree mask packed into words, see ``layout.ancestor_bits``.  For small batches
several programs share a context; a second kernel merges their parts by log-sum-exp.  Contexts are cut into shares of
equal length, so that programs finish together where contexts differ.  Grids and shapes depend only on Python values
known on the CPU, so a CUDA graph can capture the launches.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_specplug.core.attention_traits import NO_TRAITS, AttentionTraits
from vllm_specplug.core.tree_rows import DeviceTreeRows, KvPages
from vllm_specplug.gpu.kernels.tiles import (
    CacheScales,
    add_sinks,
    attend,
    attend_tree,
    count_visible,
    load_queries,
    scale_options,
    store_output,
    tile_options,
    trait_options,
    tree_arguments,
)

#: Programs that share a context, at most on average.
MAX_SPLITS = 32
#: A share has at least so many tiles: less is not worth its merge.
MIN_SHARE = tl.constexpr(2)
#: Requests and parts that one iteration of a loop looks at.
_REQUESTS, _PARTS = tl.constexpr(128), tl.constexpr(16)


#: Arguments that differ from step to step: a kernel compiled for one of their values is used for all.
_VARYING = ("block_table_stride", "bits_stride", "num_reqs", "num_items", "max_query_len", "num_row_blocks")


@triton.jit
def _first_tile(context, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the first tile of a context that a row can see: each sees itself and so fewer than ``WINDOW`` of it."""
    first = context * 0
    if WINDOW > 0:
        first = tl.maximum(context + 1 - WINDOW, 0) // BLOCK_N
    return first


@triton.jit
def _count_tiles(first_request, num_reqs, context_lens_ptr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Count the context tiles of ``_REQUESTS`` requests."""
    request = first_request + tl.arange(0, _REQUESTS)
    context = tl.load(context_lens_ptr + request, mask=request < num_reqs, other=0)
    return (context + BLOCK_N - 1) // BLOCK_N - _first_tile(context, WINDOW, BLOCK_N)


@triton.jit
def _find_part(item, num_items, num_reqs, context_lens_ptr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Find which part of which context a program attends to.

    All contexts are cut into shares of the same number of tiles, such that there are at most ``num_items`` parts; a
    request has at least one.

    Returns:
        The request, at least ``num_reqs`` for surplus programs; the part's number in it; the tiles of a share.
    """
    tiles = 0
    for first in range(0, num_reqs, _REQUESTS):
        tiles += tl.sum(_count_tiles(first, num_reqs, context_lens_ptr, WINDOW, BLOCK_N), axis=0)
    spare = num_items - num_reqs
    share = tl.maximum((tiles + spare - 1) // spare, MIN_SHARE)
    request = 0
    begin = 0  # parts of the requests before
    counted = 0
    for first in range(0, num_reqs, _REQUESTS):
        parts = (_count_tiles(first, num_reqs, context_lens_ptr, WINDOW, BLOCK_N) + share - 1) // share
        ends = counted + tl.cumsum(tl.maximum(parts, 1), axis=0)
        before = (ends <= item) & (first + tl.arange(0, _REQUESTS) < num_reqs)
        request += tl.sum(before.to(tl.int32), axis=0)
        begin = tl.maximum(begin, tl.max(tl.where(before, ends, 0), axis=0))
        counted = tl.max(ends, axis=0)
    return request, item - begin, share


@triton.jit
def _attend_context(
    tile, cache, num_visible, slopes, request, context, kv_head, first, end, scale, top, total, acc,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, HEAD_SIZE: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Attend to the tiles of a request's context from ``first`` to before ``end``.

    Args:
        tile: from ``load_queries``.
        cache: the kernel's arguments from ``cache_ptr`` to ``block_table_stride``.
        num_visible: tree keys that each row sees; None where no distance is needed.
        slopes: ALiBi slope of each row; None: none.
    """
    q, _, in_query, _, _, dims, in_head = tile
    cache_ptr, cache_block_stride, cache_head_stride, cache_slot_stride = cache[:4]
    block_table_ptr, block_table_stride = cache[4:]
    for number in range(first, end):
        position = number * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = position < context
        if WINDOW > 0:
            valid &= position > context - WINDOW  # vLLM may have freed the pages before
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
def _attend_part(
    tile, cache, tree, context_lens_ptr, sinks_ptr, slopes_ptr, request, kv_head, part, share, scale,
    WINDOW: tl.constexpr, TREE_WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, SPLIT: tl.constexpr,
    HEAD_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Attend to a part of a context; the last part takes the tree with it.

    Args:
        part, share: see ``_find_part``; read only with splits.

    Returns:
        The parts of this context; maximum, sum and weighted values of the part's softmax.
    """
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, HEAD_PADDED], 0.0, tl.float32)
    num_visible = None
    if WINDOW > 0 or slopes_ptr is not None:
        num_visible = count_visible(tile, tree, request, BLOCK_M)
    slopes = None
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + tile[4], mask=tile[2], other=0.0).to(tl.float32)
    context = tl.load(context_lens_ptr + request)
    # Plain arithmetic: each function of Triton's library costs the interpreter milliseconds.
    first = _first_tile(context, WINDOW, BLOCK_N)
    end = (context + BLOCK_N - 1) // BLOCK_N
    num_parts = 1
    if SPLIT:
        num_parts = tl.maximum((end - first + share - 1) // share, 1)
        first += part * share
        end = tl.minimum(first + share, end)
    top, total, acc = _attend_context(
        tile, cache, num_visible, slopes, request, context, kv_head, first, end, scale, top, total, acc,
        WINDOW, SOFT_CAP, HEAD_SIZE, PAGE, BLOCK_N, PRECISION, WIDEN,
    )  # fmt: skip
    if part == num_parts - 1:  # the part with the fewest context tiles
        top, total, acc = attend_tree(
            tile, tree, num_visible, slopes, request, kv_head, scale, top, total, acc,
            TREE_WINDOW, SOFT_CAP, BLOCK_N, PRECISION, WIDEN,
        )  # fmt: skip
        if sinks_ptr is not None:
            top, total, acc = add_sinks(sinks_ptr, tile, top, total, acc)
    return num_parts, top, total, acc


@triton.jit
def _store_part(parts_ptr, tops_ptr, totals_ptr, line, tile, top, total, acc, HEAD_SIZE: tl.constexpr):
    """Store the unfinished softmax of a part; ``line``: where, for each line of the tile."""
    _, _, in_query, _, _, dims, in_head = tile
    tl.store(parts_ptr + line[:, None] * HEAD_SIZE + dims[None, :], acc, mask=in_query[:, None] & in_head[None, :])
    tl.store(tops_ptr + line, top, mask=in_query)
    tl.store(totals_ptr + line, total, mask=in_query)


@triton.jit(do_not_specialize=_VARYING)
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
    part_of_ptr, parts_ptr, tops_ptr, totals_ptr,
    sinks_ptr, slopes_ptr, query_scale_ptr, key_scale_ptr, value_scale_ptr,
    scale, num_heads, num_reqs, num_items, max_query_len, num_row_blocks,
    WINDOW: tl.constexpr, TREE_WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, SCALE_BY_HEAD: tl.constexpr,
    SPLIT: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Attend from one tile of queries to a context, or to one share of it."""
    item, row_block = tl.program_id(0) // num_row_blocks, tl.program_id(0) % num_row_blocks
    kv_head = tl.program_id(1)
    request, part, share = item, 0, 0
    if SPLIT:
        request, part, share = _find_part(item, num_items, num_reqs, context_lens_ptr, WINDOW, BLOCK_N)
    query_len = tl.load(query_lens_ptr + request, mask=request < num_reqs, other=0)
    if row_block * BLOCK_M >= query_len * GROUP:
        return
    tile = load_queries(
        query_ptr, query_stride, query_head_stride, query_start_ptr, output_ptr, request, kv_head, row_block, query_len,
        GROUP, HEAD_SIZE, HEAD_PADDED, BLOCK_M,
    )  # fmt: skip
    cache = (
        cache_ptr, cache_block_stride, cache_head_stride, cache_slot_stride, block_table_ptr, block_table_stride,
    )  # fmt: skip
    tree = (
        key_ptr, key_stride, key_head_stride, value_ptr, value_stride, value_head_stride,
        tree_start_ptr, tree_lens_ptr, bits_ptr, bits_stride, bits_row_stride,
    )  # fmt: skip

    factor = kv_head * SCALE_BY_HEAD
    if query_scale_ptr is not None:
        scale *= tl.load(query_scale_ptr + factor)
    if key_scale_ptr is not None:
        scale *= tl.load(key_scale_ptr + factor)
    num_parts, top, total, acc = _attend_part(
        tile, cache, tree, context_lens_ptr, sinks_ptr, slopes_ptr, request, kv_head, part, share, scale,
        WINDOW, TREE_WINDOW, SOFT_CAP, SPLIT, HEAD_SIZE, HEAD_PADDED, PAGE, BLOCK_M, BLOCK_N, PRECISION, WIDEN,
    )  # fmt: skip
    if value_scale_ptr is not None:
        acc *= tl.load(value_scale_ptr + factor)
    if not SPLIT:
        store_output(output_ptr, output_stride, output_head_stride, tile, total, acc)
    else:
        if part == 0:
            tl.store(part_of_ptr + request * 2, item)
            tl.store(part_of_ptr + request * 2 + 1, num_parts)
        if num_parts == 1:
            store_output(output_ptr, output_stride, output_head_stride, tile, total, acc)
        else:
            line = (item * max_query_len + tile[1]).to(tl.int64) * num_heads + tile[4]
            _store_part(parts_ptr, tops_ptr, totals_ptr, line, tile, top, total, acc, HEAD_SIZE)


@triton.jit(do_not_specialize=_VARYING)
def _merge_kernel(
    output_ptr, output_stride, output_head_stride, query_start_ptr, query_lens_ptr,
    part_of_ptr, parts_ptr, tops_ptr, totals_ptr, num_heads, max_query_len,
    HEAD_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one query row and head."""
    request = tl.program_id(0) // max_query_len
    row = tl.program_id(0) % max_query_len
    head = tl.program_id(1)
    if row >= tl.load(query_lens_ptr + request):
        return
    first_item = tl.load(part_of_ptr + request * 2)
    num_parts = tl.load(part_of_ptr + request * 2 + 1)
    if num_parts == 1:
        return
    dims = tl.arange(0, HEAD_PADDED)
    in_head = dims < HEAD_SIZE
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([HEAD_PADDED], tl.float32)
    for first in range(0, num_parts, _PARTS):
        part = first + tl.arange(0, _PARTS)
        valid = part < num_parts
        line = ((first_item + part) * max_query_len + row).to(tl.int64) * num_heads + head
        tops = tl.load(tops_ptr + line, mask=valid, other=float("-inf"))
        totals = tl.load(totals_ptr + line, mask=valid, other=0.0)
        addresses = parts_ptr + line[:, None] * HEAD_SIZE + dims[None, :]
        parts = tl.load(addresses, mask=valid[:, None] & in_head[None, :], other=0.0)
        new_top = tl.maximum(top, tl.max(tops, axis=0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights, decay = tl.exp(tops - shift), tl.exp(top - shift)
        total = total * decay + tl.sum(totals * weights, axis=0)
        acc = acc * decay + tl.sum(parts * weights[:, None], axis=0)
        top = new_top
    flat = (tl.load(query_start_ptr + request) + row).to(tl.int64)
    result = acc / tl.where(total == 0.0, 1.0, total)
    addresses = output_ptr + flat * output_stride + head * output_head_stride + dims
    tl.store(addresses, result.to(output_ptr.dtype.element_ty), mask=in_head)


def tree_attention(
    query: torch.Tensor,
    output: torch.Tensor,
    pages: KvPages,
    tree: DeviceTreeRows,
    tree_key: torch.Tensor,
    tree_value: torch.Tensor,
    scale: float,
    *,
    num_splits: int | None = None,
    traits: AttentionTraits = NO_TRAITS,
    scales: CacheScales | None = None,
) -> None:
    """Attend from every query row to its request's whole context and to the tree rows that its mask shows.

    A row without visible keys gets zeros.

    Args:
        query: float of 8 (e4m3fn) to 32 bits ``[num_tokens, num_heads, head_size]``; any strides but the last.
        output: as ``query``, with 16 bits or more; only rows that the tree names are written.
        pages: with any strides but the last; a type with no more bits than the output's.
        tree: the rows; those of ``query`` and of ``tree_key``.
        tree_key, tree_value: ``[num_tree_rows, num_kv_heads, head_size]``, rounded as the pages; any strides but the
            last.
        scale: factor of the scores.
        num_splits: programs that share one context, on average; by default as many as fill the device.
        traits: see ``attention_traits``; sinks of any float dtype.  With a window, each row sees a tree key.
        scales: factors of 8-bit numbers.
    """
    kv_cache, block_table, _ = pages
    num_reqs, max_query_len = len(tree.context_lens), tree.max_query_len
    num_heads, head_size = query.shape[1:]
    _, num_kv_heads, page, _ = kv_cache.shape
    group = num_heads // num_kv_heads
    tiles = tile_options(output, max_query_len * group)
    num_row_blocks = triton.cdiv(max_query_len * group, tiles["BLOCK_M"])
    if num_splits is None:
        num_programs = num_reqs * num_row_blocks * num_kv_heads
        num_splits = _num_splits(query.device, num_programs, tree.max_context_len, traits.window, tiles)
    # Requests get parts by their contexts' lengths; as many as there are requests may be the rest of a division.
    num_items = num_reqs * (num_splits + 1 if num_splits > 1 else 1)
    room = _room_for_parts(query, num_reqs, num_items, max_query_len) if num_splits > 1 else (query,) * 4  # not read
    _tree_attention_kernel[(num_items * num_row_blocks, num_kv_heads)](
        query, query.stride(0), query.stride(1),
        output, output.stride(0), output.stride(1),
        kv_cache, kv_cache.stride(0), kv_cache.stride(1), kv_cache.stride(2),
        block_table, block_table.stride(0),
        tree.context_lens, tree.query_start, tree.query_lens,
        *tree_arguments(tree, tree_key, tree_value),
        *room,
        scale=scale, num_heads=num_heads, num_reqs=num_reqs, num_items=num_items, max_query_len=max_query_len,
        num_row_blocks=num_row_blocks, **trait_options(traits, tree.bits), **scale_options(scales),
        SPLIT=num_splits > 1, GROUP=group, PAGE=page, **tiles,
    )  # fmt: skip
    if num_splits > 1:
        _merge_kernel[(num_reqs * max_query_len, num_heads)](
            output, output.stride(0), output.stride(1), tree.query_start, tree.query_lens,
            *room, num_heads, max_query_len,
            HEAD_SIZE=head_size, HEAD_PADDED=tiles["HEAD_PADDED"], num_warps=1,
        )  # fmt: skip


def _room_for_parts(
    query: torch.Tensor, num_reqs: int, num_items: int, max_query_len: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return empty tensors: each request's first part and number of parts; weighted values, maxima, sums of parts."""
    part_of = torch.empty(num_reqs, 2, dtype=torch.int32, device=query.device)
    tops = torch.empty(num_items, max_query_len, query.shape[1], dtype=torch.float32, device=query.device)
    return part_of, tops.new_empty(*tops.shape, query.shape[2]), tops, torch.empty_like(tops)


def _num_splits(
    device: torch.device, num_programs: int, max_context_len: int | None, window: int, tiles: dict[str, Any]
) -> int:
    """Return how many programs should share a context, so that every multiprocessor gets the warps that fit on it."""
    wanted = 8 // tiles["num_warps"] * _num_processors(device) // max(num_programs, 1)
    longest = min((n for n in (max_context_len, window) if n), default=None)
    if longest is not None:
        wanted = min(wanted, longest // (MIN_SHARE.value * tiles["BLOCK_N"]))
    return max(1, min(wanted, MAX_SPLITS))


@functools.cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
