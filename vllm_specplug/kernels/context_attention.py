"""The context part of tree attention as a thing of its own: what a kernel of somebody else's is asked for.

All rows of a tree see its whole context, so any attention without a mask that returns its log-sum-exp will do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from vllm_specplug.kernels.reference import partial_attention
from vllm_specplug.kernels.tree_attention import TOKEN_LAYOUT, unpack_pages


class ContextAttention(ABC):
    """Attention of rows to the whole context of their request, over the host's pages."""

    def check_cache(self, kv_cache: torch.Tensor) -> None:
        """Try it once, before anything is served.

        Raises:
            ValueError: this cache cannot be read, or not on this device.
        """
        num_kv_heads, page, width = kv_cache.shape[1:]
        query = kv_cache.new_zeros(1, 2, num_kv_heads, width // 2)
        nothing = torch.zeros(1, dtype=torch.int32, device=kv_cache.device)
        try:
            output, sums = self(query, kv_cache, nothing[None], nothing, 1.0, page)
        except Exception as error:  # whatever libraries raise where something does not fit
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"its kernel does not run here ({reason})") from error
        if (output.shape, sums.shape, sums.dtype) != (query.shape, query.shape[:3], torch.float32):
            raise ValueError(f"its kernel returned {output.shape} and {sums.shape} {sums.dtype}: another version")

    @abstractmethod
    def __call__(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        context_lens: torch.Tensor,
        scale: float,
        max_context_len: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """No value of the device is looked at.

        Args:
            query: ``[num_reqs, num_rows, num_heads, head_size]``; the first two axes can be flattened without a copy.
            kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``, a token's key and value side by side;
                any strides but the last.
            block_table: int32 ``[num_reqs, max_blocks]``; entries behind the context must not be read.
            context_lens: int32 ``[num_reqs]``; 0: nothing is seen.
            scale: factor of the scores.
            max_context_len: no context is longer; at least 1; host value.

        Returns:
            Outputs like ``query`` (float, any strides but the last) and the log of the sum of the exponentials of the
            scores, float32 ``[num_reqs, num_rows, num_heads]``.  Where nothing is seen it is infinite, of either sign,
            and the output is not looked at.
        """


class ReferenceContext(ContextAttention):
    """The same in plain torch, on any device."""

    def __call__(self, query, kv_cache, block_table, context_lens, scale, max_context_len):
        num_pages = -(-max_context_len // kv_cache.shape[2])
        pages = kv_cache[block_table[:, :num_pages].long().clamp(min=0)]
        key, value = (
            torch.stack(part).transpose(1, 2)
            for part in zip(*(unpack_pages(own, TOKEN_LAYOUT) for own in pages.unbind()), strict=True)
        )
        visible = torch.arange(key.shape[1], device=query.device) < context_lens.unsqueeze(1)
        value = value.where(visible[:, :, None, None], 0)  # never-written slots may hold NaN
        return partial_attention(query, key, value, visible.unsqueeze(1).expand(-1, query.shape[1], -1), scale)
