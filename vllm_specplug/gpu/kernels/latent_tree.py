"""The tree part of attention over latents (MLA); it continues the attention over the context by another kernel.

A token keeps one *latent*, followed by the rotary part of its key.  All heads share it: it is attention with one KV
head, whose values are the first part of its keys.  As in ``merged_tree_attention``, a softmax over the context is a
running softmax, which the kernel here continues with the tree's latents.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_specplug.core.tree_rows import DeviceTreeRows
from vllm_specplug.gpu.kernels.tiles import add_tile, load_mask, load_queries, store_output

#: Query lines (row and head) of a program; vLLM's kernel has as many.
LINES = 16


#: Arguments that differ from step to step: a kernel compiled for one of their values is used for all.
_VARYING = ("context_stride", "sums_stride", "bits_stride", "num_row_blocks")


@triton.jit(do_not_specialize=_VARYING)
def _continue_latents_kernel(
    query_ptr, query_stride, query_head_stride,
    output_ptr, output_stride, output_head_stride,
    query_start_ptr, query_lens_ptr,
    context_ptr, context_stride, sums_ptr, sums_stride,
    latents_ptr, latents_stride, tree_start_ptr, tree_lens_ptr,
    bits_ptr, bits_stride, bits_row_stride,
    scale, num_row_blocks,
    GROUP: tl.constexpr, RANK: tl.constexpr, RANK_PADDED: tl.constexpr, ROTARY: tl.constexpr,
    ROTARY_PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Add the tree to the context attention of one tile of queries."""
    request = tl.program_id(0) // num_row_blocks
    row_block = tl.program_id(0) % num_row_blocks
    query_len = tl.load(query_lens_ptr + request)
    if row_block * BLOCK_M >= query_len * GROUP:
        return
    tile = load_queries(
        query_ptr, query_stride, query_head_stride, query_start_ptr, output_ptr, request, 0, row_block, query_len,
        GROUP, RANK, RANK_PADDED, BLOCK_M,
    )  # fmt: skip
    q, row, in_query, flat, head, dims, in_rank = tile
    turned = tl.arange(0, ROTARY_PADDED)
    in_rotary = turned < ROTARY
    rotary = query_ptr + (flat * query_stride + head * query_head_stride)[:, None] + RANK + turned[None, :]
    q_rotary = tl.load(rotary, mask=in_query[:, None] & in_rotary[None, :], other=0.0).to(q.dtype)

    line = request.to(tl.int64) * sums_stride + row * GROUP + head
    sums = tl.load(sums_ptr + line, mask=in_query, other=float("-inf"))
    seen = sums > float("-inf")  # vLLM's kernel returns no number for an empty context
    top = tl.where(seen, sums, float("-inf"))
    total = tl.where(seen, 1.0, 0.0)
    start = context_ptr + request.to(tl.int64) * context_stride + (row * GROUP + head) * RANK
    acc = tl.load(start[:, None] + dims[None, :], mask=seen[:, None] & in_rank[None, :], other=0.0)

    tree_len = tl.load(tree_lens_ptr + request)
    tree_start = tl.load(tree_start_ptr + request)
    for first in range(0, tree_len, BLOCK_N):
        node = first + tl.arange(0, BLOCK_N)
        valid = node < tree_len
        latent = latents_ptr + (tree_start + node).to(tl.int64) * latents_stride
        k = tl.load(latent[:, None] + dims[None, :], mask=valid[:, None] & in_rank[None, :], other=0.0)
        k_rotary = tl.load(
            latent[:, None] + RANK + turned[None, :], mask=valid[:, None] & in_rotary[None, :], other=0.0
        )
        if WIDEN:
            q, q_rotary = q.to(tl.float32), q_rotary.to(tl.float32)
            k, k_rotary = k.to(tl.float32), k_rotary.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores += tl.dot(q_rotary, tl.trans(k_rotary), input_precision=PRECISION)
        _, _, visible = load_mask(
            bits_ptr + request * bits_stride + row * bits_row_stride, in_query, first, node, valid
        )
        scores = tl.where(visible, scores * scale, float("-inf"))
        top, total, acc = add_tile(scores, k, top, total, acc, PRECISION)
    store_output(output_ptr, output_stride, output_head_stride, tile, total, acc)


def continue_with_tree(
    query: torch.Tensor,
    output: torch.Tensor,
    context: torch.Tensor,
    sums: torch.Tensor,
    tree: DeviceTreeRows,
    latents: torch.Tensor,
    scale: float,
) -> None:
    """Attend from every query row to its request's whole context and to the tree rows that its mask shows.

    A row without visible keys gets zeros.

    Args:
        query: float ``[num_tokens, num_heads, head_size]``: projected to the latents, then rotary.
        output: as ``query``, ``[num_tokens, num_heads, rank]``; only rows that the tree names are written.
        context: float32 ``[num_trees, >= max_query_len * num_heads, rank]``, contiguous; sums over each row's context.
        sums: float32 ``[num_trees, >= max_query_len * num_heads]``, contiguous; the log-sum-exp of their scores.  Where
            it is -inf or no number, the context is empty.
        tree: the rows; those of ``query`` and of ``latents``.
        latents: ``[num_tree_rows, head_size]``, with rotary parts; rounded as the pages.
        scale: factor of the scores.
    """
    num_heads, head_size = query.shape[1:]
    rank, is_wide = output.shape[2], output.dtype == torch.float32
    num_row_blocks = triton.cdiv(tree.max_query_len * num_heads, LINES)
    _continue_latents_kernel[(len(tree.query_lens) * num_row_blocks,)](
        query, query.stride(0), query.stride(1),
        output, output.stride(0), output.stride(1),
        tree.query_start, tree.query_lens,
        context, context.stride(0), sums, sums.stride(0),
        latents, latents.stride(0), tree.tree_start, tree.tree_lens,
        tree.bits, tree.bits.stride(0), tree.bits.stride(1),
        scale, num_row_blocks,
        GROUP=num_heads, RANK=rank, RANK_PADDED=triton.next_power_of_2(rank), ROTARY=head_size - rank,
        ROTARY_PADDED=max(16, triton.next_power_of_2(head_size - rank)), BLOCK_M=LINES, BLOCK_N=16 if is_wide else 32,
        PRECISION="ieee" if is_wide else "tf32", WIDEN=triton.knobs.runtime.interpret,
        num_warps=4, num_stages=1 if is_wide else 2,
    )  # fmt: skip
