"""vLLM's CPU attention with tree rows.

Our kernel computes all rows, so that a token's output has the same bits in a tree, in a prompt and alone; without the
operators (no compiler) vLLM's kernel computes rows without trees.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import ChunkedLocalAttention, MLAAttention
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_specplug.config import ConfigError
from vllm_specplug.core.attention_traits import AttentionTraits
from vllm_specplug.core.kv import KvScratch
from vllm_specplug.core.tree_rows import CpuTreeRows, KvPages
from vllm_specplug.cpu.kernels.cpu_ops import operators
from vllm_specplug.cpu.kernels.tree_attention import PlainRows, causal_attention, tree_attention
from vllm_specplug.vllm.attention_backends import (
    FP8,
    TreeBackend,
    TreeBuilder,
    check_attention,
    local_attention_from,
    overridden_backends,
)


class RowsWithoutTree:
    """Mixed into metadata of vLLM with a field ``tree``."""

    #: vLLM's MLA then sends all rows through one function.
    num_decodes, num_prefills = 0, 0

    @functools.cached_property
    def rows_without_tree(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Each request's first row, and its number of rows; 0 if it has a tree: int32 ``[num_reqs]``."""
        start = self.query_start_loc[:-1]
        lens = self.query_start_loc[1:] - start
        return start, lens if self.tree is None else lens.masked_fill(self.tree.query_lens > 0, 0)


@dataclass
class TreeAttentionMetadata(RowsWithoutTree, CPUAttentionMetadata):
    """vLLM's metadata with the tree rows of this forward, if any."""

    tree: CpuTreeRows | None = None


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


class TreeImpl:
    """Mixed into each attention of vLLM that reads trees here."""

    #: Whether the layer keeps latents (MLA) in place of keys and values.
    reads_latents = False


def keep_rows(
    tree: CpuTreeRows, layer_name: str, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Keep the key/value of a forward's tree rows, for later draft levels or for the commit.

    Args:
        tree: of the forward.
        layer_name: of a layer with a KV cache of its own.
        key, value: of the forward's rows, ``[num_tokens, num_kv_heads, head_size]``.

    Returns:
        Key and value that the tree's rows attend to; ``kept`` of ``tree_attention``.
    """
    if tree.scratch is not None:
        return *tree.scratch[layer_name].write(key, value), None
    if tree.commit_rows is None:
        return key, value, None
    # They are copied, because compiled graphs reuse the buffers of key and value.
    kept = tree.kept_of[layer_name]
    if tree.all_rows:
        return key, value, kept
    for part, rows in zip(kept, (key, value), strict=False):  # of latents there are keys only
        part.copy_(rows[tree.commit_rows])
    return key, value, None


class TreeAttentionImpl(TreeImpl, CPUAttentionBackendImpl):
    #: Whether our kernel computes rows without trees too.
    computes_all_rows = True
    #: Tokens of a chunk of local attention; 0: there are no chunks.
    local = 0

    @functools.cached_property
    def traits(self) -> AttentionTraits:
        """Additions of this layer to plain softmax; read from the loaded weights, on first use."""
        return AttentionTraits(
            window=max(self.sliding_window, 0),
            local=self.local,
            soft_cap=float(self.logits_soft_cap),
            sinks=None if self.sinks is None else self.sinks.detach().float(),
            alibi_slopes=self.alibi_slopes,
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        super().process_weights_after_loading(act_dtype)
        self.__dict__.pop("traits", None)  # weights may be loaded again

    @functools.cached_property
    def is_fp8(self) -> bool:
        """Whether the cache has 8 bits; vLLM stores them as bytes."""
        return self.kv_cache_dtype in FP8

    def scales(self, layer: Any) -> tuple[float, float]:
        """Factors of the scores and of the output."""
        if not self.is_fp8:
            return self.scale, 1.0
        return self.scale * layer._k_scale_float, layer._v_scale_float

    def numbers(self, stored: torch.Tensor) -> torch.Tensor:
        """Return what is stored as numbers."""
        return stored.view(FP8[self.kv_cache_dtype]) if self.is_fp8 else stored

    def as_stored(self, layer: Any, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Round keys and values as vLLM does when it writes them to the pages, by vLLM's own operator.

        Args:
            key, value: ``[num_rows, num_kv_heads, head_size]``; of an fp8 cache the results are uint8.
        """
        if not self.is_fp8:
            return key, value
        pages = key.new_empty(*key.shape[:2], 2, self.head_size, dtype=torch.uint8)  # of one token each
        ops.cpu_attn_reshape_and_cache(
            key,
            value,
            *pages.chunk(2, dim=2),
            torch.arange(len(key)),
            "vec",
            k_scale=layer._k_scale_float,
            v_scale=layer._v_scale_float,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        rounded_key, rounded_value = pages.unbind(2)
        return rounded_key, rounded_value

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
            if slots is not None and self.kv_sharing_target_layer_name is None:
                self.do_kv_cache_update(layer, key, value, kv_cache, slots)
            if attn_metadata is not None and self._is_ours(attn_metadata):
                self.attend_causally(layer, query, kv_cache, attn_metadata, output)
            else:
                super().forward(
                    layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
                )
        if tree is not None:
            self._attend_trees(layer, query, key, value, kv_cache, attn_metadata, output)
        return output

    def attend_causally(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: TreeAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        """Attend from the rows without trees, whose key/value are in the pages."""
        pages = KvPages(self.numbers(kv_cache), metadata.block_table, layer.isa)
        rows = PlainRows(metadata.seq_lens, *metadata.rows_without_tree)
        scale, value_scale = self.scales(layer)
        causal_attention(query, output, pages, rows, scale, self.traits, value_scale)

    def _attend_trees(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: TreeAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        tree, kept = metadata.tree, None
        source = self.kv_sharing_target_layer_name  # this layer reads that one's cache, and has no key and value
        if source is not None:
            key, value, tree_start = tree.rows_of(source)
            tree = replace(tree, tree_start=tree_start)
        else:
            key, value = self.as_stored(layer, key, value)
            key, value, kept = keep_rows(tree, layer.layer_name, key, value)
        pages = KvPages(self.numbers(kv_cache), metadata.block_table, layer.isa)
        scale, value_scale = self.scales(layer)
        if self.is_fp8:
            key, value, kept = (None if part is None else self.numbers(part) for part in (key, value, kept))
        tree_attention(query, output, pages, tree, key, value, scale, kept, self.traits, value_scale)

    def _is_ours(self, metadata: TreeAttentionMetadata) -> bool:
        """Whether our kernel computes rows without trees: they then have the same bits however they are batched."""
        return (
            self.computes_all_rows
            and metadata.causal
            and getattr(metadata, "dynamic_causal", None) is None
            and self.attn_type == AttentionType.DECODER
            and operators() is not None
        )


class TreeAttentionBackend(TreeBackend, CPUAttentionBackend):
    #: The compiled model then calls Python once per layer, not twice, and tree rows are not written before the commit.
    forward_includes_kv_cache_update = True

    impl, builder = TreeAttentionImpl, TreeAttentionMetadataBuilder


@functools.cache
def local_backend(underlying: type[TreeAttentionBackend], chunk: int) -> type[TreeAttentionBackend]:
    """Make the backend of layers that attend within chunks; vLLM's shows its kernel a request as one for each chunk."""
    if operators() is None:
        raise ConfigError("tree speculation reads chunks of local attention with the C++ operators only: install g++")
    impl = type(f"TreeLocalImpl{chunk}", (underlying.get_impl_cls(),), {"local": chunk})
    return type(f"TreeLocalBackend{chunk}", (underlying,), {"impl": impl})


_PATH = f"{TreeAttentionBackend.__module__}.{TreeAttentionBackend.__qualname__}"
_MLA_PATH = "vllm_specplug.cpu.mla.TreeMLABackend"


@contextmanager
def tree_backend_selected() -> Iterator[None]:
    """Build attention layers from our backends inside the context."""
    known = AttentionBackendEnum.__members__
    mla = {known[name]: _MLA_PATH for name in ("CPU_MLA", "AMX_MLA") if name in known}
    with overridden_backends({AttentionBackendEnum.CPU_ATTN: _PATH, **mla}), local_attention_from(local_backend):
        yield


def check_layers(layers: dict[str, object]) -> None:
    """Refuse layers whose attention tree attention cannot serve, see ``check_attention``."""
    check_attention(
        layers, TreeImpl, "serve this model without speculation", also=(MLAAttention, ChunkedLocalAttention)
    )
