"""Tree attention in two parts: the context by a third-party kernel, the masked tree by ours, merged by log-sum-exp.

A softmax over the context is a running softmax whose maximum is the log-sum-exp, whose sum is 1 and whose weighted
values are the output.  The kernel here continues it with the tree's keys as the next tiles, without an extra launch or
buffer.  (vLLM's ``merge_attn_states`` cannot be used: it writes all rows of a batch, this kernel only those of trees.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_specplug.core.attention_traits import NO_TRAITS, AttentionTraits
from vllm_specplug.core.tree_rows import DeviceTreeRows, KvPages
from vllm_specplug.gpu.kernels.context_attention import ContextAttention
from vllm_specplug.gpu.kernels.tiles import (
    add_sinks,
    attend_tree,
    load_queries,
    store_output,
    tile_options,
    tree_arguments,
)


@triton.jit
def _continue_kernel(
    query_ptr, query_stride, query_head_stride,
    output_ptr, output_stride, output_head_stride,
    query_start_ptr, query_lens_ptr,
    context_ptr, context_stride, context_row_stride, context_head_stride,
    sums_ptr, sums_stride, sums_row_stride, sums_head_stride,
    key_ptr, key_stride, key_head_stride,
    value_ptr, value_stride, value_head_stride,
    tree_start_ptr, tree_lens_ptr,
    bits_ptr, bits_stride, bits_row_stride,
    sinks_ptr, scale, num_row_blocks,
    SOFT_CAP: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Add the tree to the context attention of one tile of queries."""
    request = tl.program_id(0) // num_row_blocks
    row_block = tl.program_id(0) % num_row_blocks
    kv_head = tl.program_id(1)
    query_len = tl.load(query_lens_ptr + request)
    if row_block * BLOCK_M >= query_len * GROUP:
        return
    tile = load_queries(
        query_ptr, query_stride, query_head_stride, query_start_ptr, output_ptr, request, kv_head, row_block, query_len,
        GROUP, HEAD_SIZE, HEAD_PADDED, BLOCK_M,
    )  # fmt: skip
    _, row, in_query, _, head, dims, in_head = tile
    tree = (
        key_ptr, key_stride, key_head_stride, value_ptr, value_stride, value_head_stride,
        tree_start_ptr, tree_lens_ptr, bits_ptr, bits_stride, bits_row_stride,
    )  # fmt: skip

    own = request.to(tl.int64)
    sums = tl.load(
        sums_ptr + own * sums_stride + row * sums_row_stride + head * sums_head_stride, mask=in_query, other=0.0
    )
    # No visible key: FlashAttention 2 returns +inf, others -inf.
    empty = (sums == float("inf")) | (sums == float("-inf"))
    top = tl.where(empty, float("-inf"), sums)
    total = tl.where(empty, 0.0, 1.0)
    start = context_ptr + own * context_stride + row * context_row_stride + head * context_head_stride
    seen = (in_query & (empty == 0))[:, None] & in_head[None, :]
    acc = tl.load(start[:, None] + dims[None, :], mask=seen, other=0.0).to(tl.float32)

    if sinks_ptr is not None:
        top, total, acc = add_sinks(sinks_ptr, tile, top, total, acc)
    top, total, acc = attend_tree(
        tile, tree, None, None, request, kv_head, scale, top, total, acc, 0, SOFT_CAP, BLOCK_N, PRECISION, WIDEN
    )
    store_output(output_ptr, output_stride, output_head_stride, tile, total, acc)


def merged_tree_attention(
    attend_context: ContextAttention,
    query: torch.Tensor,
    output: torch.Tensor,
    pages: KvPages,
    tree: DeviceTreeRows,
    tree_key: torch.Tensor,
    tree_value: torch.Tensor,
    scale: float,
    *,
    traits: AttentionTraits = NO_TRAITS,
) -> None:
    """Attend from every query row to its request's whole context and to the tree rows that its mask shows.

    Args:
        attend_context: attends to the context, with the soft cap of ``traits`` and without sinks.
        query .. scale: as in ``tree_attention.tree_attention``; the context of a request without query rows should be
            0, else it is read in vain.
        traits: see ``attention_traits``; sinks of any float dtype.

    Raises:
        ValueError: ``attend_context`` does not support the traits.
    """
    if not attend_context.supports(traits):
        raise ValueError(f"{type(attend_context).__name__} does not support {traits}: use tree_attention='triton'")
    kv_cache, block_table, _ = pages
    max_query_len, max_context_len = tree.max_query_len, tree.max_context_len
    num_reqs, num_kv_heads = tree.context_lens.shape[0], tree_key.shape[1]
    if tree.uniform:
        rows = query[: num_reqs * max_query_len].unflatten(0, (num_reqs, max_query_len))
    else:
        index = tree.query_start.long().unsqueeze(1) + torch.arange(max_query_len, device=query.device)
        rows = query[index.clamp(max=query.shape[0] - 1)]  # beyond a request's rows: any row, its result is unused
    if max_context_len is None:
        max_context_len = block_table.shape[1] * kv_cache.shape[2]
    table, longest = block_table[:num_reqs], max(max_context_len, 1)
    context, sums = attend_context(rows, kv_cache, table, tree.context_lens, scale, longest)
    group = query.shape[1] // num_kv_heads
    tiles = tile_options(output, max_query_len * group)
    num_row_blocks = triton.cdiv(max_query_len * group, tiles["BLOCK_M"])
    _continue_kernel[(tree.query_lens.shape[0] * num_row_blocks, num_kv_heads)](
        query, query.stride(0), query.stride(1),
        output, output.stride(0), output.stride(1),
        tree.query_start, tree.query_lens,
        context, context.stride(0), context.stride(1), context.stride(2),
        sums, sums.stride(0), sums.stride(1), sums.stride(2),
        *tree_arguments(tree, tree_key, tree_value),
        traits.sinks, scale, num_row_blocks,
        SOFT_CAP=traits.soft_cap, GROUP=group, **tiles,
    )  # fmt: skip
