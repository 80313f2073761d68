"""The device attention on a CPU, for tests under Triton's interpreter: the host's page layout, our kernel.

The host's own part is plain torch here: its kernels ask for a CUDA device, or take seconds in the interpreter.
"""

from __future__ import annotations

import torch
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

from vllm_specplug.hosts.attention.paged import TreeImpl, TreeTritonBackend
from vllm_specplug.kernels.tree_attention import TOKEN_LAYOUT, tree_attention_reference


class _PagedReference(TritonAttentionImpl):
    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        written = (slot_mapping >= 0).nonzero().squeeze(1)  # a slot below 0 is padding
        slots, page = slot_mapping[written], kv_cache.shape[2]
        kv_cache[slots // page, :, slots % page] = torch.cat([key[written], value[written]], dim=-1)

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *_) -> torch.Tensor:
        if attn_metadata is None:
            return output.fill_(0)
        start = attn_metadata.query_start_loc[:-1]
        lens = attn_metadata.query_start_loc[1:] - start
        longest = int(lens.max())
        tree_attention_reference(
            query,
            output,
            kv_cache,
            TOKEN_LAYOUT,
            attn_metadata.block_table,
            attn_metadata.seq_lens - lens,
            start,
            lens,
            key,
            value,
            start,
            lens,
            torch.ones(len(lens), longest, longest, dtype=torch.bool).tril(),
            self.scale,
        )
        return output


class InterpretedImpl(TreeImpl, _PagedReference):
    pass


class InterpretedBackend(TreeTritonBackend):
    @staticmethod
    def get_impl_cls() -> type[InterpretedImpl]:
        return InterpretedImpl
