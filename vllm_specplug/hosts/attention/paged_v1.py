"""The paged attention of ``v2_attention`` for the V1 runner, whose full CUDA graphs know no trees.

A graph recorded for a batch of chains would replay trees as chains; without it, V1 records what is between attention
layers.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_specplug.core.kv import KvScratch
from vllm_specplug.core.layout import ancestor_bits
from vllm_specplug.hosts.attention.backends import overridden_backends
from vllm_specplug.hosts.attention.paged import LevelMetadata, TreeTritonBackend, TreeTritonMetadataBuilder
from vllm_specplug.hosts.v2.trees import DeviceTreeRows


class NoFullGraphs:
    """Mixed into a metadata builder."""

    @classmethod
    def get_cudagraph_support(cls, *_: object) -> AttentionCGSupport:
        return AttentionCGSupport.NEVER


class TritonBuilderV1(NoFullGraphs, TreeTritonMetadataBuilder):
    pass


class TritonBackendV1(TreeTritonBackend):
    @staticmethod
    def get_builder_cls() -> type[TritonBuilderV1]:
        return TritonBuilderV1


_TRITON = f"{__name__}.TritonBackendV1"
_INTERPRETED = "vllm_specplug.hosts.v1.interpreted.InterpretedBackendV1"
_FLASH = "vllm_specplug.hosts.attention.flash_v1.FlashBackendV1"


def v1_device_backends() -> AbstractContextManager[None]:
    """Attention layers built inside use our backends; other engines of the process do not."""
    if current_platform.is_cpu():
        return overridden_backends({AttentionBackendEnum.CPU_ATTN: _INTERPRETED})
    return overridden_backends({AttentionBackendEnum.TRITON_ATTN: _TRITON, AttentionBackendEnum.FLASH_ATTN: _FLASH})


def upload_rows(
    context_lens: torch.Tensor,
    start: torch.Tensor,
    lens: torch.Tensor,
    mask: torch.Tensor,
    masked: list[int],
    all_rows: bool,
    device: torch.device,
) -> DeviceTreeRows:
    """The device's view of a verification forward, from host values (see ``TreeModelRunner._tree_rows``)."""
    is_masked = torch.zeros(len(lens), dtype=torch.bool)
    is_masked[masked] = True
    lens = lens.masked_fill(~is_masked, 0)
    on_device = [values.to(device) for values in (context_lens, start, lens, ancestor_bits(mask))]
    return DeviceTreeRows(
        context_lens=on_device[0],
        query_start=on_device[1],
        query_lens=on_device[2],
        tree_start=on_device[1],
        tree_lens=on_device[2],
        bits=on_device[3],
        max_query_len=mask.shape[1],
        max_context_len=int(context_lens.max()),
        all_rows=all_rows,
        uniform=all_rows and bool((lens == mask.shape[1]).all()),
    )


def device_scratch_metadata(
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    width: int,
    tree_start: torch.Tensor,
    mask: torch.Tensor,
    scratch: dict[str, KvScratch],
) -> LevelMetadata:
    """``attention.scratch_metadata`` for the device attention; nothing is read back."""
    query_start = torch.arange(len(context_lens), dtype=torch.int32, device=context_lens.device) * width
    tree = DeviceTreeRows(
        context_lens=context_lens,
        query_start=query_start,
        query_lens=torch.full_like(query_start, width),
        tree_start=tree_start,
        tree_lens=torch.full_like(query_start, mask.shape[2]),
        bits=ancestor_bits(mask),
        max_query_len=width,
        max_context_len=None,
        all_rows=True,
        uniform=True,
        scratch=scratch,
    )
    return LevelMetadata(block_table, tree)
