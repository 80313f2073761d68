"""The host's CPU attention with tree rows: a subclass that changes nothing where no tree is attached."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_specplug.config import ConfigError
from vllm_specplug.core.kv import KvScratch
from vllm_specplug.hosts.attention.backends import overridden_backends, refuse_features
from vllm_specplug.kernels.tree_attention import tree_attention


@dataclass
class TreeRows:
    """Rows of a forward that attend by a tree mask.

    Attributes:
        block_table: int32 ``[num_trees, max_blocks]``.
        context_lens: int32 ``[num_trees]``; cached tokens that every row sees.
        query_start, query_lens: int32 ``[num_trees]``; the tree's rows in the flat batch.
        tree_start, tree_lens: int32 ``[num_trees]``; its rows among the tree keys.
        mask: bool ``[num_trees, max_query_len, max_tree_len]``.
        all_rows: whether the forward has no other rows: the host's kernel is not needed, and nothing is written to
            the pages before the commit.
        scratch: by layer, where tree keys live; None: they are this forward's own key/value.
        commit_rows: int64 ``[num_rows]``: flat rows whose key/value are kept for the commit; None keeps nothing.
        kept: where they are kept, ``[num_layers, 2, num_rows, num_kv_heads, head_size]``; None with a scratch.
        kept_of: by layer name, its part of ``kept``.
    """

    block_table: torch.Tensor
    context_lens: torch.Tensor
    query_start: torch.Tensor
    query_lens: torch.Tensor
    tree_start: torch.Tensor
    tree_lens: torch.Tensor
    mask: torch.Tensor
    all_rows: bool
    scratch: dict[str, KvScratch] | None = None
    commit_rows: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    kept_of: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class TreeAttentionMetadata(CPUAttentionMetadata):
    """The host's metadata with the tree rows of this forward, if any."""

    tree: TreeRows | None = None


def scratch_metadata(
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    width: int,
    tree_start: torch.Tensor,
    mask: torch.Tensor,
    scratch: dict[str, KvScratch],
) -> TreeAttentionMetadata:
    """Metadata of a drafting forward: pages are read, and what it drafts lives in the scratch.

    Args:
        block_table: int32 ``[num_reqs, max_blocks]``.
        context_lens: int32 ``[num_reqs]``; cached tokens that every row sees.
        width: rows of each request.
        tree_start: int32 ``[num_reqs]``; its first row in the scratch.
        mask: bool ``[num_reqs, width, tree_len]``; which of its scratch rows each row sees.
        scratch: by layer name.
    """
    num_reqs = len(context_lens)
    query_start = torch.arange(num_reqs, dtype=torch.int32) * width
    tree = TreeRows(
        block_table=block_table,
        context_lens=context_lens,
        query_start=query_start,
        query_lens=torch.full_like(query_start, width),
        tree_start=tree_start,
        tree_lens=torch.full_like(query_start, mask.shape[2]),
        mask=mask,
        all_rows=True,
        scratch=scratch,
    )
    return TreeAttentionMetadata(
        num_actual_tokens=num_reqs * width,
        max_query_len=width,
        query_start_loc=query_start,
        max_seq_len=0,
        seq_lens=context_lens,
        block_table=block_table,
        slot_mapping=query_start,
        scheduler_metadata=None,
        tree=tree,
    )


class TreeAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> TreeAttentionMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return TreeAttentionMetadata(**vars(metadata))


class TreeAttentionImpl(CPUAttentionBackendImpl):
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
        if tree is None or not tree.all_rows:
            slots = get_forward_context().slot_mapping.get(layer.layer_name)
            if slots is not None:
                self.do_kv_cache_update(layer, key, value, kv_cache, slots)
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)
        if tree is None:
            return output
        kept = None
        if tree.scratch is not None:
            key, value = tree.scratch[layer.layer_name].write(key, value)
        elif tree.commit_rows is not None:
            # A copy: compiled graphs reuse the buffers of key and value.
            kept = tree.kept_of[layer.layer_name]
            if not tree.all_rows:
                kept[0], kept[1] = key[tree.commit_rows], value[tree.commit_rows]
                kept = None
        tree_attention(
            query,
            output,
            kv_cache,
            layer.isa,
            tree.block_table,
            tree.context_lens,
            tree.query_start,
            tree.query_lens,
            key,
            value,
            tree.tree_start,
            tree.tree_lens,
            tree.mask,
            self.scale,
            kept,
        )
        return output


class TreeAttentionBackend(CPUAttentionBackend):
    #: One call from the compiled model into Python a layer, not two; and rows of a tree wait for the commit.
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_impl_cls() -> type[TreeAttentionImpl]:
        return TreeAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeAttentionMetadataBuilder]:
        return TreeAttentionMetadataBuilder


_PATH = f"{TreeAttentionBackend.__module__}.{TreeAttentionBackend.__qualname__}"


def tree_backend_selected() -> AbstractContextManager[None]:
    """Attention layers built inside use our backend; other engines of the process do not."""
    return overridden_backends({AttentionBackendEnum.CPU_ATTN: _PATH})


def check_layers(layers: dict[str, object]) -> None:
    """Refuse attention features that tree attention does not implement, by name.

    Raises:
        ConfigError: naming the first layer and feature.
    """
    for name, layer in layers.items():
        impl = getattr(layer, "impl", None)
        if not isinstance(impl, TreeAttentionImpl):
            raise ConfigError(f"tree speculation does not support the attention of {name} ({type(impl).__name__})")
        features = (
            (impl.sliding_window != -1, "a sliding window"),
            (impl.alibi_slopes is not None, "ALiBi"),
            (impl.sinks is not None, "attention sinks"),
            (bool(impl.logits_soft_cap), "a logit soft cap"),
            (impl.is_fp8_kv_cache, "a quantised KV cache"),
            (impl.kv_sharing_target_layer_name is not None, "KV sharing between layers"),
        )
        refuse_features(name, features)
