"""vLLM's FlashAttention for the context part of tree attention: without a mask, returning the log-sum-exp."""

from __future__ import annotations

from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

from vllm_specplug.gpu.kernels.context_attention import ContextAttention, multiples_on_device


class FlashContext(ContextAttention):
    """Calls ``flash_attn_varlen_func`` once over vLLM's pages.

    All requests have the same number of query rows, so that the prefix sums of rows need no values from the device.
    FlashAttention supports float16 and bfloat16 only; its output has that dtype when it is merged (as in vLLM's cascade
    attention).

    Args:
        head_size: of the layer.
        soft_cap: of the layer; 0: none.

    Raises:
        ValueError: vLLM has no FlashAttention for this device.
    """

    caps_scores = True

    def __init__(self, head_size: int, soft_cap: float = 0.0):
        self._soft_cap = soft_cap
        needed = {"requires_softcap": True} if soft_cap else {}
        self._version = get_flash_attn_version(head_size=head_size, **needed)
        if self._version is None:
            raise ValueError("vLLM has no FlashAttention for this device")
        from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

        self._attend = flash_attn_varlen_func

    def __call__(self, query, kv_cache, block_table, context_lens, scale, max_context_len):
        num_reqs, num_rows, num_heads, head_size = query.shape
        key, value = (
            # With one KV head, FlashAttention 3 and 4 would read wrong strides.
            canonicalize_singleton_dim_strides(part)
            for part in kv_cache.transpose(1, 2).split(head_size, dim=-1)
        )
        output, sums = self._attend(
            q=query.flatten(0, 1),
            k=key,
            v=value,
            cu_seqlens_q=multiples_on_device(num_rows, num_reqs + 1, query.device),
            max_seqlen_q=num_rows,
            seqused_k=context_lens,
            max_seqlen_k=max_context_len,
            softmax_scale=scale,
            causal=False,
            softcap=self._soft_cap,
            block_table=block_table,
            return_softmax_lse=True,
            fa_version=self._version,
        )
        # The sums have the shape [num_heads, num_reqs * num_rows].
        return output.unflatten(0, (num_reqs, num_rows)), sums.unflatten(1, (num_reqs, num_rows)).permute(1, 2, 0)
