"""The host's FlashAttention with tree rows: prefill, plain rows and draft layers keep its kernels."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from vllm_specplug.hosts.attention.paged import TreeImpl
from vllm_specplug.hosts.v2.trees import DeviceTreeRows


@dataclass
class TreeFlashMetadata(FlashAttentionMetadata):
    """The host's metadata with the tree rows of this forward, if any."""

    tree: DeviceTreeRows | None = None


class TreeFlashMetadataBuilder(FlashAttentionMetadataBuilder):
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> TreeFlashMetadata:
        return TreeFlashMetadata(**vars(super().build(common_prefix_len, common_attn_metadata, fast_build)))


class TreeFlashImpl(TreeImpl, FlashAttentionImpl):
    pass


class TreeFlashBackend(FlashAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[TreeFlashImpl]:
        return TreeFlashImpl

    @staticmethod
    def get_builder_cls() -> type[TreeFlashMetadataBuilder]:
        return TreeFlashMetadataBuilder
