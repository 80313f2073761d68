"""vLLM's FlashAttention with tree rows; all other rows keep its kernels."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from vllm_specplug.gpu.attention import TreeImpl
from vllm_specplug.vllm.attention_backends import TreeBuilder
from vllm_specplug.vllm.tree_rows import DeviceTreeRows


@dataclass
class TreeFlashMetadata(FlashAttentionMetadata):
    """vLLM's metadata with the tree rows of this forward, if any, and that of the requests after the trees."""

    tree: DeviceTreeRows | None = None
    others: FlashAttentionMetadata | None = None


class TreeFlashMetadataBuilder(TreeBuilder, FlashAttentionMetadataBuilder):
    metadata = TreeFlashMetadata


class TreeFlashImpl(TreeImpl, FlashAttentionImpl):
    pass


class TreeFlashBackend(FlashAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[TreeFlashImpl]:
        return TreeFlashImpl

    @staticmethod
    def get_builder_cls() -> type[TreeFlashMetadataBuilder]:
        return TreeFlashMetadataBuilder
