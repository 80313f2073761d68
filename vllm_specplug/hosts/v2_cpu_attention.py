"""The device attention on a CPU, for tests under Triton's interpreter: the host's page layout and kernels, and ours."""

from __future__ import annotations

import torch

from vllm_specplug.hosts.v2_attention import TreeTritonBackend, TreeTritonImpl


class InterpretedImpl(TreeTritonImpl):
    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        """What the host's kernel does, which asks for a CUDA device; a slot below 0 is padding."""
        written = (slot_mapping >= 0).nonzero().squeeze(1)
        slots, page = slot_mapping[written], kv_cache.shape[2]
        kv_cache[slots // page, :, slots % page] = torch.cat([key[written], value[written]], dim=-1)


class InterpretedBackend(TreeTritonBackend):
    @staticmethod
    def get_impl_cls() -> type[InterpretedImpl]:
        return InterpretedImpl
