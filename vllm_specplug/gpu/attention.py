"""vLLM's paged attention on a device with tree rows; a forward without trees is unchanged.

vLLM's backend ``TRITON_ATTN`` is extended here, ``FLASH_ATTN`` in ``flash.py``.  With both, the option
``tree_attention`` selects the kernel for tree rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import MLAAttention
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)

from vllm_specplug.config import ConfigError
from vllm_specplug.core.attention_traits import AttentionTraits
from vllm_specplug.core.tree_rows import DeviceTreeRows, KvPages
from vllm_specplug.gpu.kernels.context_attention import ContextAttention
from vllm_specplug.gpu.kernels.merged_tree_attention import merged_tree_attention
from vllm_specplug.gpu.kernels.step import cache_pointers
from vllm_specplug.gpu.kernels.tiles import CacheScales, warm_up
from vllm_specplug.gpu.kernels.tree_attention import tree_attention
from vllm_specplug.vllm.attention_backends import FP8, TreeBackend, TreeBuilder, check_attention, overridden_backends
from vllm_specplug.vllm.kv_groups import AlikeLayers

logger = logging.getLogger("vllm_specplug")


@dataclass
class LevelMetadata:
    """Attention metadata of a draft level; vLLM's kernels never receive it.

    Attributes:
        block_table: int32 ``[num_reqs, max_blocks]``.
        tree: the level's rows; the forward has no others.
    """

    block_table: torch.Tensor
    tree: DeviceTreeRows


class TreeImpl:
    """Mixed into an attention implementation of vLLM whose pages keep a token's key and value side by side.

    Attributes:
        context: attends to the context of tree rows; None: our Triton kernel attends to the context and the tree.
    """

    context: ContextAttention | None = None

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Return whether the compiler may let attention quantise its output: the kernels of trees do not."""
        return False

    @cached_property
    def traits(self) -> AttentionTraits:
        """Additions of the layer to plain softmax.  Sinks are vLLM's own weights, of the model's dtype."""
        return AttentionTraits(
            window=self.sliding_window[0] + 1,  # vLLM does not count the row itself; -1: no window
            soft_cap=float(self.logits_soft_cap or 0),
            sinks=self.sinks,
            alibi_slopes=self.alibi_slopes,
        )

    @cached_property
    def is_fp8(self) -> bool:
        """Whether the cache has 8 bits; vLLM keeps them as bytes."""
        return self.kv_cache_dtype in FP8

    def numbers(self, stored: torch.Tensor) -> torch.Tensor:
        """Return what is stored as numbers: on GPUs vLLM reads both formats of fp8 alike."""
        return stored.view(current_platform.fp8_dtype()) if self.is_fp8 else stored

    def scales(self, layer: Any, query: torch.Tensor) -> CacheScales:
        """Return the layer's factors; the query has one only if it has 8 bits too."""
        is_rounded = query.dtype == current_platform.fp8_dtype()
        return CacheScales(layer._q_scale if is_rounded else None, layer._k_scale, layer._v_scale)

    def as_stored(self, layer: Any, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Round a draft level's keys and values to the cache's type: ``[num_rows, num_kv_heads, head_size]`` each."""
        if not self.is_fp8:
            return key.to(layer.kv_cache_torch_dtype), value.to(layer.kv_cache_torch_dtype)
        kind = current_platform.fp8_dtype()
        most = torch.finfo(kind).max
        divided = key / layer._k_scale.view(-1, 1), value / layer._v_scale.view(-1, 1)
        rounded_key, rounded_value = (part.clamp(-most, most).to(kind).view(torch.uint8) for part in divided)
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
        tree: DeviceTreeRows | None = getattr(attn_metadata, "tree", None)
        attend_others = partial(super().forward, output_scale=output_scale, output_block_scale=output_block_scale)
        if tree is None:
            return attend_others(layer, query, key, value, kv_cache, attn_metadata, output)
        if not tree.all_rows and attn_metadata.others is None:
            attend_others(layer, query, key, value, kv_cache, attn_metadata, output)
        elif not tree.all_rows:
            first = tree.num_tree_rows
            rows = (values if values is None else values[first:] for values in (query, key, value))
            attend_others(layer, *rows, kv_cache, attn_metadata.others, output[first:])
        self._attend_trees(layer, query, key, value, kv_cache, attn_metadata, output)
        return output

    def _attend_trees(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
    ) -> None:
        tree: DeviceTreeRows = attn_metadata.tree
        source = self.kv_sharing_target_layer_name  # this layer reads that one's cache, and has no key and value
        if tree.scratch is not None:
            scratch = tree.scratch[source or layer.layer_name]
            if source is None:
                scratch.write(*self.as_stored(layer, key, value))
            key, value = scratch.key, scratch.value
        elif source is not None or kv_cache.dtype != key.dtype:  # vLLM has rounded what it wrote
            key, value = rows_in_pages(kv_cache, get_forward_context().slot_mapping[layer.layer_name])
        attend = tree_attention
        if self.context is not None:
            attend = partial(merged_tree_attention, self.context)
        elif self.is_fp8:
            attend = partial(tree_attention, scales=self.scales(layer, query))
        pages = KvPages(self.numbers(kv_cache), attn_metadata.block_table)
        attend(query, output, pages, tree, self.numbers(key), self.numbers(value), self.scale, traits=self.traits)


def rows_in_pages(kv_cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Read this forward's keys and values for a layer that shares the cache of another, which has written them.

    Args:
        kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``.
        slots: int ``[num_rows]``; of padding rows -1, whose result is arbitrary.

    Returns:
        Key and value, each ``[num_rows, num_kv_heads, head_size]``.
    """
    page = kv_cache.shape[2]
    key, value = kv_cache[slots // page, :, slots % page].chunk(2, dim=-1)
    return key, value


def with_trees(metadata: Any, rows: DeviceTreeRows) -> Any:
    """Return a copy of vLLM's metadata with the trees of a forward.

    Where the trees come first and other requests after them, vLLM's kernel gets the latter only.
    """
    num_trees, first, others = len(rows.context_lens), rows.num_tree_rows, None
    if first is not None and not any(torch.is_tensor(getattr(metadata, name, None)) for name in _BY_REQUEST):
        others = replace(
            metadata,
            query_start_loc=metadata.query_start_loc[num_trees:] - first,
            seq_lens=metadata.seq_lens[num_trees:],
            block_table=metadata.block_table[num_trees:],
            slot_mapping=metadata.slot_mapping[first:],
            num_actual_tokens=metadata.num_actual_tokens - first,
            scheduler_metadata=None,  # FlashAttention 3 plans by itself then
        )
    return replace(metadata, tree=rows, others=others)


#: Fields that some models add to the metadata, by request or by row of the whole batch; they are not split.
_BY_REQUEST = ("causal", "mm_prefix_range_tensor", "mm_prefix_query_range_tensor", "rswa_prefix_lens")


@dataclass
class TreeTritonMetadata(TritonAttentionMetadata):
    """vLLM's metadata with the tree rows of this forward, if any, and that of the requests after the trees."""

    tree: DeviceTreeRows | None = None
    others: TritonAttentionMetadata | None = None


class TreeTritonMetadataBuilder(TreeBuilder, TritonAttentionMetadataBuilder):
    metadata = TreeTritonMetadata


class TreeTritonImpl(TreeImpl, TritonAttentionImpl):
    pass


class TreeTritonBackend(TreeBackend, TritonAttentionBackend):
    impl, builder = TreeTritonImpl, TreeTritonMetadataBuilder


#: Tree attention by vLLM's backend, as dotted paths.
BACKENDS = {
    AttentionBackendEnum.TRITON_ATTN: f"{__name__}.TreeTritonBackend",
    AttentionBackendEnum.FLASH_ATTN: "vllm_specplug.gpu.flash.TreeFlashBackend",
    AttentionBackendEnum.TRITON_MLA: "vllm_specplug.gpu.mla.TreeTritonMLABackend",
    AttentionBackendEnum.FLASH_ATTN_MLA: "vllm_specplug.gpu.flash_mla.TreeFlashMLABackend",
}


#: Without tree attention, and before the others in vLLM's lists: a module that does not exist, so that vLLM takes the
#: next.  (A version of vLLM may not know all names.)
HIDDEN = {
    known: f"{__name__}.no_tree_attention.Backend"
    for name in ("FLASHINFER", "FLASHINFER_MLA", "TOKENSPEED_MLA", "CUTLASS_MLA", "FLASHMLA")
    if (known := AttentionBackendEnum.__members__.get(name)) is not None
}


def device_tree_backends(chosen: AttentionBackendEnum | None = None) -> AbstractContextManager[None]:
    """Build attention layers from our backends inside the context.

    Args:
        chosen: the user's ``attention_config.backend``; None: vLLM takes the first of its list that has tree attention.
    """
    return overridden_backends(BACKENDS if chosen is not None else {**BACKENDS, **HIDDEN})


def log_backends(layers: dict[str, Any], chosen: AttentionBackendEnum | None) -> None:
    """Say which attention serves where vLLM would have taken another."""
    if chosen is None and current_platform.is_device_capability_family(100):
        names = sorted({layer.get_attn_backend().get_name() for layer in layers.values()})
        logger.info(
            "vllm-specplug: attention backend %s: FLASHINFER, vLLM's first choice on this GPU, has no tree attention",
            ", ".join(names),
        )


def by_latents(layers: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split layers into those that keep latents (MLA) and others."""
    latents = {name: layer for name, layer in layers.items() if isinstance(layer, MLAAttention)}
    return latents, {name: layer for name, layer in layers.items() if name not in latents}


def use_tree_attention(layers: dict[str, Any], name: str) -> None:
    """Select one of ``config.TREE_ATTENTIONS`` for the layers' tree rows.

    Layers with traits that it does not support keep ``triton``.

    Raises:
        ConfigError: it cannot run here.
    """
    if name == "triton":
        return
    latents, layers = by_latents(layers)
    if latents:
        raise ConfigError(f"tree_attention={name!r} reads no latents (MLA): use tree_attention='triton'")
    if name == "flash":
        from vllm_specplug.gpu.flash_context import FlashContext as Context
    else:
        from vllm_specplug.gpu.kernels.xformers_context import XformersContext as Context
    kept = 0
    for layer in layers.values():
        impl = layer.impl
        if not Context.supports(impl.traits):
            kept += 1
            continue
        if layer.impl.is_fp8:
            raise ConfigError(f"tree_attention={name!r} reads no fp8 KV cache: use tree_attention='triton'")
        with _refused_as(name):
            soft_cap = {"soft_cap": impl.traits.soft_cap} if Context.caps_scores else {}
            impl.context = Context(impl.head_size, **soft_cap)
    if kept:
        logger.info(
            "tree_attention=%r: %d of %d layers use 'triton' (sliding window, ALiBi or soft cap)",
            name,
            kept,
            len(layers),
        )


def check_caches(layers: dict[str, Any], name: str) -> None:
    """Refuse allocated KV caches that the context's kernel cannot read.

    Raises:
        ConfigError: naming the fix.
    """
    for layer in by_latents(layers)[1].values():
        if layer.impl.context is not None:
            with _refused_as(name):
                layer.impl.context.check_cache(layer.kv_cache)


def committed_caches(alike: list[AlikeLayers]) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Return arguments of ``move_rows`` for each entry: its group, one cache, the addresses of all caches."""
    return [(layers.group, layers.caches[0], cache_pointers(layers.caches)) for layers in alike]


def tell_builders(attn_groups: Sequence[Sequence[Any]], rows_of_step: Callable[[], DeviceTreeRows | None]) -> None:
    """Let the builders of metadata that read the step's trees (of MLA) know them."""
    for part in (part for parts in attn_groups for part in parts):
        for builder in part.metadata_builders:
            if hasattr(builder, "rows_of_step"):
                builder.rows_of_step = rows_of_step


def compile_kernels(layers: dict[str, Any], bits: torch.Tensor, longest: int) -> None:
    """Compile the kernels of the layers' tree rows, so that no step waits for them.

    Args:
        bits: int64 ``[>= 1, max_query_len, num_words]``, as wide as those of any step; not read.
        longest: tokens of a context, at most.
    """
    latents, layers = by_latents(layers)
    if latents:
        from vllm_specplug.gpu import mla

        mla.compile_kernels(latents, bits, longest)
    for layer in layers.values():
        impl, kind = layer.impl, layer.dtype
        attends = [partial(tree_attention, num_splits=splits) for splits in (1, 2)]
        if impl.context is not None:
            attends = [partial(merged_tree_attention, impl.context)]
        if impl.is_fp8:
            rounded = current_platform.fp8_dtype() if layer.query_quant is not None else kind
            scales = impl.scales(layer, bits.new_empty(0, dtype=rounded))
            attends, kind = [partial(attend, scales=scales) for attend in attends], rounded
        warm_up(attends, impl.numbers(layer.kv_cache), impl.num_heads, bits, impl.traits, (kind, layer.dtype))


@contextmanager
def _refused_as(name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"tree_attention={name!r} cannot be used: {error}, or use tree_attention='triton'") from error


def check_layers(layers: dict[str, Any]) -> None:
    """Refuse layers whose attention tree attention cannot serve, see ``check_attention``."""
    latents, others = by_latents(layers)
    check_attention(others, TreeImpl, "use --attention-backend FLASH_ATTN or TRITON_ATTN")
    if latents:
        from vllm_specplug.gpu.mla import TreeMLAImpl

        fix = "use --attention-backend TRITON_MLA or FLASH_ATTN_MLA"
        check_attention(latents, TreeMLAImpl, fix, also=(MLAAttention,))
