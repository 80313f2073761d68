"""vLLM's FlashAttention over latents (MLA, Hopper) with tree rows; see ``mla``."""

from __future__ import annotations

from vllm.v1.attention.backends.mla.flashattn_mla import (
    FlashAttnMLABackend,
    FlashAttnMLAImpl,
    FlashAttnMLAMetadataBuilder,
)

from vllm_specplug.gpu.mla import TreeMLABuilder, TreeMLAImpl


class TreeFlashMLABuilder(TreeMLABuilder, FlashAttnMLAMetadataBuilder):
    pass


class TreeFlashMLAImpl(TreeMLAImpl, FlashAttnMLAImpl):
    pass


class TreeFlashMLABackend(FlashAttnMLABackend):
    @staticmethod
    def get_impl_cls() -> type[TreeFlashMLAImpl]:
        return TreeFlashMLAImpl

    @staticmethod
    def get_builder_cls() -> type[TreeFlashMLABuilder]:
        return TreeFlashMLABuilder
