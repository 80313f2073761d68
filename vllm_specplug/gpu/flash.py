"""vLLM's FlashAttention with tree rows; all other rows keep its kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from vllm_specplug.core.tree_rows import DeviceTreeRows
from vllm_specplug.gpu.attention import TreeImpl
from vllm_specplug.gpu.rounds import shapes
from vllm_specplug.vllm.attention_backends import TreeBackend, TreeBuilder


@dataclass
class TreeFlashMetadata(FlashAttentionMetadata):
    """vLLM's metadata with the tree rows of this forward, if any, and that of the requests after the trees."""

    tree: DeviceTreeRows | None = None
    others: FlashAttentionMetadata | None = None


class TreeFlashMetadataBuilder(TreeBuilder, FlashAttentionMetadataBuilder):
    """FlashAttention 3 reserves room for the parts of a recorded call: the number of parts times its output.

    vLLM allows many parts up to its largest capture size.  Larger batches, which only graphs of trees have, get one.
    """

    metadata = TreeFlashMetadata

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        limits = self.max_num_splits, self.max_cudagraph_size
        if self.max_num_splits and self._exceeds_vllms_graphs(common_attn_metadata):
            self.max_num_splits, self.max_cudagraph_size = 1, common_attn_metadata.num_actual_tokens
        try:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        finally:
            self.max_num_splits, self.max_cudagraph_size = limits

    def _exceeds_vllms_graphs(self, batch: Any) -> bool:
        """Return whether a batch may run from a graph of trees that is larger than any graph of vLLM."""
        width, num_tokens = batch.max_query_len, batch.num_actual_tokens
        return self.max_cudagraph_size < num_tokens == batch.num_reqs * width and width in self._widths

    @cached_property
    def _widths(self) -> set[int]:
        return {1 + shape.nodes for shape in shapes(self.vllm_config.speculative_config.specplug)}


class TreeFlashImpl(TreeImpl, FlashAttentionImpl):
    pass


class TreeFlashBackend(TreeBackend, FlashAttentionBackend):
    impl, builder = TreeFlashImpl, TreeFlashMetadataBuilder
