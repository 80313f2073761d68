"""Building blocks of the Triton tree attention kernels: tile sizes, and functions that attend to one tile of keys.

Triton inlines these functions.  A tile of queries has one line per (query row, head of the group): all heads of a group
share their keys.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_specplug.core.attention_traits import AttentionTraits
from vllm_specplug.core.tree_rows import DeviceTreeRows, KvPages


class CacheScales(NamedTuple):
    """Factors of 8-bit numbers, float32 ``[1]`` or ``[num_kv_heads]`` each.

    Attributes:
        query: None: the queries have more bits.
        key, value: of the pages and of tree rows.
    """

    query: torch.Tensor | None
    key: torch.Tensor
    value: torch.Tensor


#: The interpreter's dot product misreads bfloat16 as integers, so its inputs are widened there.
_INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def attend(
    q, k, v, visible, distance, slopes, scale, top, total, acc,
    SOFT_CAP: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Update a running softmax (maximum, sum and weighted values) with one tile of keys.

    Args:
        distance: of each key from each row; read only with slopes.
        slopes: ALiBi slope of each row; None: none.
    """
    k, v = k.to(q.dtype), v.to(q.dtype)  # pages may have fewer bits
    if WIDEN:
        q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if SOFT_CAP > 0.0:
        # tanh in a form that does not overflow
        scores = SOFT_CAP * (1.0 - 2.0 / (tl.exp(scores * (2.0 / SOFT_CAP)) + 1.0))
    if slopes is not None:
        scores -= slopes[:, None] * distance
    scores = tl.where(visible, scores, float("-inf"))
    return add_tile(scores, v, top, total, acc, PRECISION)


@triton.jit
def add_tile(scores, v, top, total, acc, PRECISION: tl.constexpr):
    """Update a running softmax with scores ``[lines, keys]``, of hidden keys -inf, and their values."""
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # for rows with no visible key so far
    weights = tl.exp(scores - shift[:, None])
    decay = tl.exp(top - shift)
    total = total * decay + tl.sum(weights, axis=1)
    acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return new_top, total, acc


@triton.jit
def add_sinks(sinks_ptr, tile, top, total, acc):
    """Add the sink of each row's head to a running softmax: a score without a value."""
    _, _, in_query, _, head, _, _ = tile
    sink = tl.load(sinks_ptr + head, mask=in_query, other=0.0).to(tl.float32)
    new_top = tl.maximum(top, sink)
    decay = tl.exp(top - new_top)
    return new_top, total * decay + tl.exp(sink - new_top), acc * decay[:, None]


@triton.jit
def load_queries(
    query_ptr, query_stride, query_head_stride, query_start_ptr, output_ptr, request, kv_head, row_block, query_len,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Load one tile of a request's queries and their indices.

    Returns:
        The queries ``[BLOCK_M, HEAD_PADDED]``, of the output's type; the query row of each line, whether the request
        has it, its row in the batch and its head; the dimensions of a head, and whether they exist.
    """
    index = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    row = index // GROUP
    head = kv_head * GROUP + index % GROUP
    in_query = row < query_len
    dims = tl.arange(0, HEAD_PADDED)
    in_head = dims < HEAD_SIZE
    flat = (tl.load(query_start_ptr + request) + row).to(tl.int64)
    addresses = query_ptr + (flat * query_stride + head * query_head_stride)[:, None] + dims[None, :]
    q = tl.load(addresses, mask=in_query[:, None] & in_head[None, :], other=0.0)
    return q.to(output_ptr.dtype.element_ty), row, in_query, flat, head, dims, in_head


@triton.jit
def store_output(output_ptr, output_stride, output_head_stride, tile, total, acc):
    """Store the finished softmax of a tile from ``load_queries``."""
    _, _, in_query, flat, head, dims, in_head = tile
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # a row without visible keys gets zeros
    addresses = output_ptr + (flat * output_stride + head * output_head_stride)[:, None] + dims[None, :]
    tl.store(addresses, result.to(output_ptr.dtype.element_ty), mask=in_query[:, None] & in_head[None, :])


@triton.jit
def count_bits(words):
    """Count the ones of each int64."""
    pairs = words - ((words >> 1) & 0x5555555555555555)
    fours = (pairs & 0x3333333333333333) + ((pairs >> 2) & 0x3333333333333333)
    bytes_ = (fours + (fours >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((bytes_ * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def count_visible(tile, tree, request, BLOCK_M: tl.constexpr):
    """Count the tree keys that each row sees: the distance from the row to the context's last key."""
    _, row, in_query, _, _, _, _ = tile
    tree_lens_ptr, bits_ptr, bits_stride, bits_row_stride = tree[7:]
    word = bits_ptr + request * bits_stride + row * bits_row_stride
    count = tl.zeros([BLOCK_M], tl.int32)
    for number in range((tl.load(tree_lens_ptr + request) + 63) // 64):
        count += count_bits(tl.load(word + number, mask=in_query, other=0))
    return count


@triton.jit
def load_mask(bits_ptr, in_query, first, node, valid):
    """Load which tree keys of a tile each line sees.

    A tile lies within one word: it starts at a multiple of its width, which divides the word's bits.

    Args:
        bits_ptr: of each line's words.
        in_query: whether the request has the line.
        first: key of the tile.
        node, valid: the tile's keys, and whether they exist.

    Returns:
        The word of each line, the bit of each key, and bool ``[lines, keys]``.
    """
    words = tl.load(bits_ptr + first // 64, mask=in_query, other=0)
    bit = (node % 64).to(tl.int64)
    return words, bit, (((words[:, None] >> bit[None, :]) & 1) != 0) & valid[None, :]


@triton.jit
def attend_tree(
    tile, tree, num_visible, slopes, request, kv_head, scale, top, total, acc,
    TREE_WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Attend to a request's tree keys, tile by tile; each row sees what its mask allows.

    Args:
        tile: from ``load_queries``.
        tree: the kernels' arguments from ``key_ptr`` to ``bits_row_stride``.
        num_visible: from ``count_visible``; None where no distance is needed.
        slopes: ALiBi slope of each row; None: none.
    """
    q, row, in_query, _, _, dims, in_head = tile
    key_ptr, key_stride, key_head_stride, value_ptr, value_stride, value_head_stride = tree[:6]
    tree_start_ptr, tree_lens_ptr, bits_ptr, bits_stride, bits_row_stride = tree[6:]
    tree_len = tl.load(tree_lens_ptr + request)
    tree_start = tl.load(tree_start_ptr + request)
    behind = num_visible  # visible keys that do not precede the word of the tile
    for first in range(0, tree_len, BLOCK_N):
        node = first + tl.arange(0, BLOCK_N)
        valid = node < tree_len
        loads = valid[:, None] & in_head[None, :]
        flat_node = (tree_start + node).to(tl.int64)
        keys = key_ptr + flat_node * key_stride + kv_head * key_head_stride
        values = value_ptr + flat_node * value_stride + kv_head * value_head_stride
        k = tl.load(keys[:, None] + dims[None, :], mask=loads, other=0.0)
        v = tl.load(values[:, None] + dims[None, :], mask=loads, other=0.0)
        words, bit, visible = load_mask(
            bits_ptr + request * bits_stride + row * bits_row_stride, in_query, first, node, valid
        )
        distance = None
        if TREE_WINDOW > 0 or slopes is not None:
            up_to = (tl.full([BLOCK_N], 2, tl.int64) << bit) - 1  # all ones for the last bit
            distance = behind[:, None] - count_bits(words[:, None] & up_to[None, :])
            if (first + BLOCK_N) % 64 == 0:
                behind -= count_bits(words)
            if TREE_WINDOW > 0:
                visible &= distance < TREE_WINDOW
        top, total, acc = attend(q, k, v, visible, distance, slopes, scale, top, total, acc, SOFT_CAP, PRECISION, WIDEN)
    return top, total, acc


def tile_options(output: torch.Tensor, num_rows: int) -> dict[str, Any]:
    """Choose tile sizes and launch options.

    Args:
        output: ``[num_tokens, num_heads, head_size]``, of the type in which tiles are multiplied.
        num_rows: rows of a request that share a KV head.
    """
    head_size = output.shape[2]
    head_padded = triton.next_power_of_2(head_size)
    row_bytes, wide = head_padded * output.element_size(), output.dtype == torch.float32
    # At most 32 KiB of queries and 16 KiB of keys per tile.
    block_m = max(16, min(128, triton.next_power_of_2(num_rows), (32 << 10) // row_bytes))
    return {
        "HEAD_SIZE": head_size,
        "HEAD_PADDED": head_padded,
        "BLOCK_M": block_m,
        "BLOCK_N": max(16, min(64, (16 << 10) // row_bytes)),
        "PRECISION": "ieee" if wide else "tf32",
        "WIDEN": _INTERPRETED,
        # At most 64 registers of a thread for the output.
        "num_warps": 8 if block_m * max(head_padded, 128) >= 128 * 128 else 4,
        # 100 KiB of shared memory hold only two stages.
        "num_stages": 3 if not wide and _shared_memory(output.device) >= 160 << 10 else 2,
    }


def trait_options(traits: AttentionTraits, bits: torch.Tensor) -> dict[str, Any]:
    """Return the kernels' arguments for a layer's traits; those of absent traits compile to nothing.

    Args:
        bits: int64 ``[..., num_words]``; see ``layout.ancestor_bits``.
    """
    return {
        "sinks_ptr": traits.sinks,
        "slopes_ptr": traits.alibi_slopes,
        "WINDOW": traits.window,
        # A row sees at most as many tree keys as its mask has bits: a wider window hides none of them.
        "TREE_WINDOW": traits.window if traits.window < 64 * bits.shape[-1] else 0,
        "SOFT_CAP": traits.soft_cap,
    }


def tree_arguments(tree: DeviceTreeRows, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor | int, ...]:
    """Return the kernels' arguments from ``key_ptr`` to ``bits_row_stride``."""
    return (
        *(key, key.stride(0), key.stride(1), value, value.stride(0), value.stride(1)),
        *(tree.tree_start, tree.tree_lens, tree.bits, tree.bits.stride(0), tree.bits.stride(1)),
    )


def scale_options(scales: CacheScales | None) -> dict[str, Any]:
    """Return the kernel's arguments for the factors of 8-bit numbers; None: there are none."""
    query, key, value = (None, None, None) if scales is None else scales
    is_by_head = key is not None and key.numel() > 1
    return {"query_scale_ptr": query, "key_scale_ptr": key, "value_scale_ptr": value, "SCALE_BY_HEAD": int(is_by_head)}


def warm_up(
    attends: Sequence[Callable[..., None]],
    kv_cache: torch.Tensor,
    num_heads: int,
    bits: torch.Tensor,
    traits: AttentionTraits,
    dtypes: tuple[torch.dtype, torch.dtype] | None = None,
) -> None:
    """Compile what a layer may launch: the kernels of each attention, once per tile height.

    Args:
        attends: called like ``tree_attention.tree_attention``, with a request that has no rows.
        kv_cache: of the layer; not read.
        num_heads: of the layer's queries.
        bits: int64 ``[>= 1, max_query_len, num_words]``, for the most rows of a request; not read.
        traits: of the layer.
        dtypes: of queries and outputs; None: as the cache.
    """
    _, num_kv_heads, _, width = kv_cache.shape
    key = torch.zeros(1, num_kv_heads, width // 2, dtype=kv_cache.dtype, device=kv_cache.device)
    query, output = (key.new_zeros(1, num_heads, width // 2, dtype=dtype) for dtype in dtypes or [key.dtype] * 2)
    nothing = torch.zeros(1, dtype=torch.int32, device=kv_cache.device)
    heights: dict[int, int] = {}
    for rows in range(1, bits.shape[1] + 1):
        heights.setdefault(tile_options(output, rows * (num_heads // num_kv_heads))["BLOCK_M"], rows)
    pages = KvPages(kv_cache, nothing[None])
    empty = dict.fromkeys(("context_lens", "query_start", "query_lens", "tree_start", "tree_lens"), nothing)
    for rows, attend in itertools.product(heights.values(), attends):
        tree = DeviceTreeRows(**empty, bits=bits[:1], max_query_len=rows)
        attend(query, output, pages, tree, key, key, 1.0, traits=traits)


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory available to one program."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 0
