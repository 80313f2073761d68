"""vLLM's CPU attention with tree rows.

Our kernel computes all rows, so that a token's output has the same bits in a tree, in a prompt and alone; without the
operators (no compiler) vLLM's kernel computes rows without trees.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_specplug.core.attention_traits import AttentionTraits
from vllm_specplug.core.kv import KvScratch
from vllm_specplug.cpu.kernels.cpu_ops import operators
from vllm_specplug.cpu.kernels.tree_attention import causal_attention, tree_attention
from vllm_specplug.vllm.attention_backends import TreeBuilder, check_attention, overridden_backends
from vllm_specplug.vllm.tree_rows import CpuTreeRows


@dataclass
class TreeAttentionMetadata(CPUAttentionMetadata):
    """vLLM's metadata with the tree rows of this forward, if any."""

    tree: CpuTreeRows | None = None

    @functools.cached_property
    def rows_without_tree(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Each request's first row, and its number of rows; 0 if it has a tree: int32 ``[num_reqs]``."""
        start = self.query_start_loc[:-1]
        lens = self.query_start_loc[1:] - start
        return start, lens if self.tree is None else lens.masked_fill(self.tree.query_lens > 0, 0)


def level_metadata(
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    tree_start: torch.Tensor,
    mask: torch.Tensor,
    scratch: dict[str, KvScratch],
) -> TreeAttentionMetadata:
    """Make the metadata of a draft level: it reads the pages, and its key/value go to the scratch.

    Args:
        block_table: int32 ``[num_reqs, max_blocks]``.
        context_lens: int32 ``[num_reqs]``; cached tokens that every row sees.
        tree_start: int32 ``[num_reqs]``; the request's first row in the scratch.
        mask: bool ``[num_reqs, width, tree_len]``; which rows of the request's scratch each row sees.
        scratch: by layer name.
    """
    num_reqs, width, tree_len = mask.shape
    tree = CpuTreeRows.of_level(context_lens, tree_start, width, tree_len, scratch, mask=mask)
    return TreeAttentionMetadata(
        num_actual_tokens=num_reqs * width,
        max_query_len=width,
        query_start_loc=tree.query_start,
        max_seq_len=0,
        seq_lens=context_lens,
        block_table=block_table,
        slot_mapping=tree.query_start,
        scheduler_metadata=None,
        tree=tree,
    )


class TreeAttentionMetadataBuilder(TreeBuilder, CPUAttentionMetadataBuilder):
    metadata = TreeAttentionMetadata


class TreeAttentionImpl(CPUAttentionBackendImpl):
    #: Whether our kernel computes rows without trees too.
    computes_all_rows = True

    @functools.cached_property
    def traits(self) -> AttentionTraits:
        """Additions of this layer to plain softmax; read from the loaded weights, on first use."""
        return AttentionTraits(
            window=max(self.sliding_window, 0),
            soft_cap=float(self.logits_soft_cap),
            sinks=None if self.sinks is None else self.sinks.detach().float(),
            alibi_slopes=self.alibi_slopes,
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        super().process_weights_after_loading(act_dtype)
        self.__dict__.pop("traits", None)  # weights may be loaded again

    def forward(
        self,
        layer,
        query,
        key,
        value,
        kv_cache,
        attn_metadata,
        output,
        output_scale=None,
        output_block_scale=None,
    ) -> torch.Tensor:
        tree = None if attn_metadata is None else attn_metadata.tree
        source = self.kv_sharing_target_layer_name  # this layer reads that one's cache, and has no key and value
        if tree is None or not tree.all_rows:
            slots = get_forward_context().slot_mapping.get(layer.layer_name)
            if slots is not None and source is None:
                self.do_kv_cache_update(layer, key, value, kv_cache, slots)
            if attn_metadata is not None and self._is_ours(attn_metadata):
                start, lens = attn_metadata.rows_without_tree
                rows = (attn_metadata.block_table, attn_metadata.seq_lens, start, lens)
                causal_attention(query, output, kv_cache, layer.isa, *rows, self.scale, self.traits)
            else:
                super().forward(
                    layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
                )
        if tree is None:
            return output
        tree_start, kept = tree.tree_start, None
        if source is not None:
            key, value, tree_start = tree.rows_of(source)
        elif tree.scratch is not None:
            key, value = tree.scratch[layer.layer_name].write(key, value)
        elif tree.commit_rows is not None:
            # They are copied, because compiled graphs reuse the buffers of key and value.
            kept = tree.kept_of[layer.layer_name]
            if not tree.all_rows:
                kept[0], kept[1] = key[tree.commit_rows], value[tree.commit_rows]
                kept = None
        tree_attention(
            query,
            output,
            kv_cache,
            layer.isa,
            attn_metadata.block_table,
            tree.context_lens,
            tree.query_start,
            tree.query_lens,
            key,
            value,
            tree_start,
            tree.tree_lens,
            tree.mask,
            self.scale,
            kept,
            self.traits,
        )
        return output

    def _is_ours(self, metadata: TreeAttentionMetadata) -> bool:
        """Whether our kernel computes rows without trees: they then have the same bits however they are batched."""
        return (
            self.computes_all_rows
            and metadata.causal
            and getattr(metadata, "dynamic_causal", None) is None
            and self.attn_type == AttentionType.DECODER
            and operators() is not None
        )


class TreeAttentionBackend(CPUAttentionBackend):
    #: The compiled model then calls Python once per layer, not twice, and tree rows are not written before the commit.
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_impl_cls() -> type[TreeAttentionImpl]:
        return TreeAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeAttentionMetadataBuilder]:
        return TreeAttentionMetadataBuilder


_PATH = f"{TreeAttentionBackend.__module__}.{TreeAttentionBackend.__qualname__}"


def tree_backend_selected() -> AbstractContextManager[None]:
    """Build attention layers from our backend inside the context."""
    return overridden_backends({AttentionBackendEnum.CPU_ATTN: _PATH})


def check_layers(layers: dict[str, object]) -> None:
    """Refuse layers whose attention tree attention cannot serve, see ``check_attention``."""
    check_attention(layers, TreeAttentionImpl, "serve this model without speculation")
