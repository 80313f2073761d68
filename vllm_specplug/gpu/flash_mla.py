"""vLLM's FlashAttention over latents (MLA, Hopper) with tree rows; see ``mla``."""

from __future__ import annotations

from vllm.v1.attention.backends.mla.flashattn_mla import (
    FlashAttnMLABackend,
    FlashAttnMLAImpl,
    FlashAttnMLAMetadataBuilder,
)

from vllm_specplug.gpu.mla import TreeMLABuilder, TreeMLAImpl
from vllm_specplug.vllm.attention_backends import TreeBackend


class TreeFlashMLABuilder(TreeMLABuilder, FlashAttnMLAMetadataBuilder):
    pass


class TreeFlashMLAImpl(TreeMLAImpl, FlashAttnMLAImpl):
    pass


class TreeFlashMLABackend(TreeBackend, FlashAttnMLABackend):
    impl, builder = TreeFlashMLAImpl, TreeFlashMLABuilder
