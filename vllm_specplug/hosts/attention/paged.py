"""The host's paged attention with tree rows on a device: subclasses that change nothing where no tree is attached.

``TRITON_ATTN`` is here (it also runs on a CPU, under Triton's interpreter), ``FLASH_ATTN`` in ``v2_flash_attention``.
Whichever it is, tree rows attend as ``tree_attention`` of our options says.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)

from vllm_specplug.config import ConfigError
from vllm_specplug.hosts.attention.backends import overridden_backends, refuse_features
from vllm_specplug.hosts.v2.trees import DeviceTreeRows
from vllm_specplug.kernels.context_attention import ContextAttention
from vllm_specplug.kernels.merged_tree_attention import merged_tree_attention
from vllm_specplug.kernels.triton_tree_attention import tree_attention


@dataclass
class LevelMetadata:
    """What the attention of a drafter's level needs; no host kernel sees it.

    Attributes:
        block_table: int32 ``[num_reqs, max_blocks]``.
        tree: the level's rows; all rows of the forward.
    """

    block_table: torch.Tensor
    tree: DeviceTreeRows


class TreeImpl:
    """Mixed into an attention implementation of the host whose pages keep a token's key and value side by side.

    Attributes:
        context: attends to the context of tree rows; None: our kernel does both parts.
    """

    context: ContextAttention | None = None

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
        if tree is None or not tree.all_rows:
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)
        if tree is None:
            return output
        if tree.scratch is not None:
            key, value = tree.scratch[layer.layer_name].write(key, value)
        attend = tree_attention
        if self.context is not None:
            attend = functools.partial(merged_tree_attention, self.context, uniform=tree.uniform)
        attend(
            query,
            output,
            kv_cache,
            attn_metadata.block_table,
            tree.context_lens,
            tree.query_start,
            tree.query_lens,
            key,
            value,
            tree.tree_start,
            tree.tree_lens,
            tree.bits,
            self.scale,
            max_query_len=tree.max_query_len,
            max_context_len=tree.max_context_len,
        )
        return output


@dataclass
class TreeTritonMetadata(TritonAttentionMetadata):
    """The host's metadata with the tree rows of this forward, if any."""

    tree: DeviceTreeRows | None = None


class TreeTritonMetadataBuilder(TritonAttentionMetadataBuilder):
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> TreeTritonMetadata:
        return TreeTritonMetadata(**vars(super().build(common_prefix_len, common_attn_metadata, fast_build)))


class TreeTritonImpl(TreeImpl, TritonAttentionImpl):
    pass


class TreeTritonBackend(TritonAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[TreeTritonImpl]:
        return TreeTritonImpl

    @staticmethod
    def get_builder_cls() -> type[TreeTritonMetadataBuilder]:
        return TreeTritonMetadataBuilder


_TRITON = f"{__name__}.TreeTritonBackend"
_INTERPRETED = "vllm_specplug.hosts.attention.interpreted.InterpretedBackend"
_FLASH = "vllm_specplug.hosts.attention.flash.TreeFlashBackend"


def _overrides() -> dict[AttentionBackendEnum, str]:
    if current_platform.is_cpu():
        return {AttentionBackendEnum.CPU_ATTN: _INTERPRETED}
    return {AttentionBackendEnum.TRITON_ATTN: _TRITON, AttentionBackendEnum.FLASH_ATTN: _FLASH}


def device_tree_backends() -> AbstractContextManager[None]:
    """Attention layers built inside use our backends; other engines of the process do not."""
    return overridden_backends(_overrides())


def use_tree_attention(layers: dict[str, Any], name: str) -> None:
    """Let the layers' tree rows attend by one of ``config.TREE_ATTENTIONS``.

    Raises:
        ConfigError: it cannot run here.
    """
    if name == "triton":
        return
    if name == "flash":
        from vllm_specplug.hosts.attention.flash_context import FlashContext as Context
    else:
        from vllm_specplug.kernels.xformers_context import XformersContext as Context
    for layer in layers.values():
        with _refused_as(name):
            layer.impl.context = Context(layer.impl.head_size)


def check_caches(layers: dict[str, Any], name: str) -> None:
    """Refuse caches that the context's kernel cannot read, once they are there.

    Raises:
        ConfigError: naming the fix.
    """
    for layer in layers.values():
        if layer.impl.context is not None:
            with _refused_as(name):
                layer.impl.context.check_cache(layer.kv_cache)


@contextmanager
def _refused_as(name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"tree_attention={name!r} cannot be used: {error}, or use tree_attention='triton'") from error


def check_layers(layers: dict[str, Any]) -> None:
    """Refuse attention that tree attention does not implement, by name.

    Raises:
        ConfigError: naming the first layer and feature.
    """
    for name, layer in layers.items():
        impl = getattr(layer, "impl", None)
        if not isinstance(impl, TreeImpl):
            raise ConfigError(
                f"tree speculation does not support the attention of {name} ({type(impl).__name__}): use "
                "--attention-backend FLASH_ATTN or TRITON_ATTN"
            )
        features = (
            (tuple(impl.sliding_window) != (-1, -1), "a sliding window"),
            (impl.alibi_slopes is not None, "ALiBi"),
            (getattr(impl, "sinks", None) is not None, "attention sinks"),
            (bool(impl.logits_soft_cap), "a logit soft cap"),
            (impl.kv_cache_dtype.startswith(("fp8", "int")), "a quantised KV cache"),
            (impl.kv_sharing_target_layer_name is not None, "KV sharing between layers"),
        )
        refuse_features(name, features)
