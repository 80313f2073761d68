"""The context part of tree attention: the interface to third-party attention kernels.

Any unmasked attention that also returns its log-sum-exp can be used, where all rows of a tree attend to the context
alike.  With a sliding window or ALiBi, that depends on a row's depth.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from vllm_specplug.core.attention_traits import AttentionTraits

#: By device and step: multiples on the device.  Recorded CUDA graphs hold their addresses.
_multiples: dict[tuple[torch.device, int], torch.Tensor] = {}
_NUM_MULTIPLES = 4096


def multiples_on_device(step: int, count: int, device: torch.device) -> torch.Tensor:
    """Return 0, ``step``, ... as int32 ``[count]``; not to be written.  Usually without a launch."""
    known = _multiples.get((device, step))
    if known is not None and count <= _NUM_MULTIPLES:
        return known[:count]
    is_recording = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if count > _NUM_MULTIPLES or is_recording:  # memory allocated now would belong to the graph
        return torch.arange(count, dtype=torch.int32, device=device) * step
    known = torch.arange(_NUM_MULTIPLES, dtype=torch.int32, device=device) * step
    _multiples[device, step] = known
    return known[:count]


class ContextAttention(ABC):
    """Attention of rows to the whole context of their request, over vLLM's pages, without sinks.

    Attributes:
        caps_scores: whether the kernel supports a soft cap.
    """

    caps_scores = False

    @classmethod
    def supports(cls, traits: AttentionTraits) -> bool:
        """Return whether the kernel can attend to the contexts of a layer with these traits."""
        alike = traits.window == 0 and traits.alibi_slopes is None
        return alike and (cls.caps_scores or traits.soft_cap == 0)

    def check_cache(self, kv_cache: torch.Tensor) -> None:
        """Run the kernel once, before any request is served.

        Raises:
            ValueError: the kernel cannot read this cache, or does not run on this device.
        """
        num_kv_heads, page, width = kv_cache.shape[1:]
        query = kv_cache.new_zeros(1, 2, num_kv_heads, width // 2)
        nothing = torch.zeros(1, dtype=torch.int32, device=kv_cache.device)
        try:
            output, sums = self(query, kv_cache, nothing[None], nothing, 1.0, page)
        except Exception as error:  # libraries raise errors of many types
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"its kernel does not run here ({reason})") from error
        if (output.shape, sums.shape, sums.dtype) != (query.shape, query.shape[:3], torch.float32):
            raise ValueError(f"its kernel returned {output.shape} and {sums.shape} {sums.dtype}: unsupported version")

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
        """Attend to the contexts without reading values back to the CPU.

        Args:
            query: ``[num_reqs, num_rows, num_heads, head_size]``; the first two axes can be flattened without a copy.
            kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``, a token's key and value side by side;
                any strides but the last.
            block_table: int32 ``[num_reqs, max_blocks]``; entries after the context must not be read.
            context_lens: int32 ``[num_reqs]``; 0: the rows of the request see nothing.
            scale: factor of the scores.
            max_context_len: upper bound of ``context_lens``, at least 1.

        Returns:
            Outputs like ``query`` (float, any strides but the last) and the log-sum-exp of the scores, float32
            ``[num_reqs, num_rows, num_heads]``.  For rows that see nothing it is +inf or -inf, and the output is
            ignored.
        """
