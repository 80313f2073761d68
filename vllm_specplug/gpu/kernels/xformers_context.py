"""xformers' partial attention as the context part of tree attention.  Optional: ``pip install xformers``.

Facts of xformers 0.0.35.  Its split-k kernel reads paged keys without further packages, as one long axis of tokens
(``PagedBlockDiagonalPaddedKeysMask``: ``[1, num_blocks * page_size, ...]``).  vLLM's cache therefore needs a layout in
which a layer's blocks are consecutive and a token's heads are side by side (vLLM's default, ``LBNHC``); other layouts
are refused.  The page size must be a multiple of the kernel's key tile, so the tile is made as small as the page.
Supported are heads of 16, 32, 64, 128, 256 or 512, float16 and bfloat16, and a Triton with block pointers (3.6 has
them, 3.9 does not).  The masks' constructors take lists of lengths on the CPU, which are not available here: the
tensors are put into the dataclasses directly, with upper bounds as Python ints.  Our kernel merges the result;
xformers' ``merge_attentions`` would need a third buffer and write all rows.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from vllm_specplug.gpu.kernels.context_attention import ContextAttention, multiples_on_device

HEAD_SIZES = (16, 32, 64, 128, 256, 512)
_TILES = (64, 32, 16)


def problem(head_size: int) -> str | None:
    """Return why xformers cannot be used, or None.  Does not import it, which would initialise CUDA."""
    if find_spec("xformers") is None:
        return "xformers is not installed: pip install xformers"
    if head_size not in HEAD_SIZES:
        return f"xformers supports no heads of {head_size}"
    return None


class XformersContext(ContextAttention):
    """Context attention by ``memory_efficient_attention_partial``.

    Args:
        head_size: of the layer.

    Raises:
        ValueError: xformers cannot be used.
    """

    def __init__(self, head_size: int):
        if reason := problem(head_size):
            raise ValueError(reason)
        from xformers.ops.fmha import attn_bias, memory_efficient_attention_partial, triton_splitk

        self._attend, self._bias = memory_efficient_attention_partial, attn_bias
        self._operators = {tile: type(f"Tile{tile}", (triton_splitk.FwOp,), {"BLOCK_N": tile}) for tile in _TILES}

    def check_cache(self, kv_cache: torch.Tensor) -> None:
        page = kv_cache.shape[2]
        if kv_cache.stride(0) != page * kv_cache.stride(2):
            raise ValueError("xformers supports only the cache layout LBNHC: unset VLLM_KV_CACHE_LAYOUT")
        if page % _TILES[-1]:
            raise ValueError(f"xformers supports no pages of {page} tokens: use --block-size 16 or a multiple of it")
        super().check_cache(kv_cache)

    def __call__(self, query, kv_cache, block_table, context_lens, scale, max_context_len):
        num_reqs, num_rows, num_heads, head_size = query.shape
        num_kv_heads, page = kv_cache.shape[1:3]
        group = num_heads // num_kv_heads
        # [1, num_tokens, num_kv_heads, group, head_size]; a stride of 0 marks grouped queries.
        key, value = (
            part.flatten(0, 1)[None, :, :, None].expand(-1, -1, -1, group, -1)
            for part in kv_cache.transpose(1, 2).split(head_size, dim=-1)
        )
        pages = -(-max_context_len // page)
        output, sums = self._attend(
            query.flatten(0, 1)[None].unflatten(2, (num_kv_heads, group)),
            key,
            value,
            attn_bias=self._mask(num_reqs, num_rows, context_lens, block_table[:, :pages], page),
            scale=scale,
            op=self._operators[next(tile for tile in _TILES if page % tile == 0)],
        )
        # [1, num_kv_heads, group, num_reqs * num_rows], in float64 where the output is float32.
        sums = sums[0].flatten(0, 1).unflatten(1, (num_reqs, num_rows)).permute(1, 2, 0).float()
        return output[0].flatten(1, 2).unflatten(0, (num_reqs, num_rows)), sums

    def _mask(
        self, num_reqs: int, num_rows: int, context_lens: torch.Tensor, block_table: torch.Tensor, page: int
    ) -> Any:
        width = block_table.shape[1] * page
        row_starts = range(0, num_reqs * num_rows + 1, num_rows)
        device = context_lens.device
        return self._bias.PagedBlockDiagonalPaddedKeysMask(
            q_seqinfo=self._bias._SeqLenInfo(
                seqstart=multiples_on_device(num_rows, num_reqs + 1, device),
                # With one row each, the kernel would take another code path, with other shapes.
                max_seqlen=max(num_rows, 2),
                min_seqlen=num_rows,
                seqstart_py=list(row_starts),
            ),
            k_seqinfo=self._bias._PaddedSeqLenInfo(
                seqstart=torch.arange(0, num_reqs * width + 1, width, dtype=torch.int32, device=device),
                max_seqlen=width,
                min_seqlen=0,
                seqstart_py=list(range(0, num_reqs * width + 1, width)),
                seqlen=context_lens,
                seqlen_py=[width] * num_reqs,
                padding=width,
            ),
            block_tables=block_table,
            page_size=page,
        )
