"""Shared by all tree attention backends: how vLLM selects them, their metadata builder, the features they refuse."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention, MLAAttention, chunked_local_attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from vllm_specplug.config import ConfigError

#: KV caches of 8 bits that are served: numbers in the format, with factors for a whole layer or for each KV head.
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
#: All served values of ``--kv-cache-dtype``.
CACHE_FORMATS = ("auto", "float16", "bfloat16", "float32", *FP8)


@contextlib.contextmanager
def overridden_backends(overrides: Mapping[AttentionBackendEnum, str]) -> Iterator[None]:
    """Build attention layers from these classes (dotted paths) inside the context only.

    Other engines of the process keep vLLM's classes.
    """
    selector._cached_get_attn_backend.cache_clear()
    for backend, path in overrides.items():
        register_backend(backend, path)
    try:
        yield
    finally:
        for backend in overrides:
            backend.clear_override()
        selector._cached_get_attn_backend.cache_clear()


@contextlib.contextmanager
def local_attention_from(make: Callable[[type, int], type]) -> Iterator[None]:
    """Build layers of chunked local attention from ``make(backend, tokens of a chunk)`` inside the context only."""
    honest = chunked_local_attention.create_chunked_local_attention_backend
    chunked_local_attention.create_chunked_local_attention_backend = make
    try:
        yield
    finally:
        chunked_local_attention.create_chunked_local_attention_backend = honest


class TreeBuilder:
    """Mixed into a metadata builder of vLLM: its metadata gets a field ``tree``, None at first.

    Attributes:
        metadata: vLLM's metadata class with the field.
    """

    metadata: type

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        return self.metadata(**vars(super().build(common_prefix_len, common_attn_metadata, fast_build)))


class TreeBackend:
    """Mixed into a backend of vLLM.

    Attributes:
        impl: of its layers.
        builder: of its metadata.
    """

    impl: type
    builder: type

    @classmethod
    def get_impl_cls(cls) -> type:
        return cls.impl

    @classmethod
    def get_builder_cls(cls) -> type:
        return cls.builder


def check_attention(layers: Mapping[str, Any], implementation: type, fix: str, also: tuple[type, ...] = ()) -> None:
    """Refuse a layer unless it is causal self-attention over a paged KV cache, in a backend with tree attention.

    Args:
        layers: all layers that keep something per token or attend (vLLM's ``AttentionLayerBase``), by name.
        implementation: the tree attention that every layer must have.
        fix: advice for a layer that has another one.
        also: classes of vLLM besides ``Attention`` whose layers the implementation serves.

    Raises:
        ConfigError: naming the first layer and the reason.
    """
    for name, layer in layers.items():
        reason = _other_mechanism(layer, also)
        if reason is not None:
            raise ConfigError(
                f"tree speculation needs layers of causal self-attention: {name} ({type(layer).__name__}) {reason}; "
                "serve this model without speculation"
            )
        if not isinstance(layer.impl, implementation):
            kind = type(layer.impl).__name__
            raise ConfigError(f"tree speculation does not support the attention of {name} ({kind}): {fix}")
        if layer.impl.kv_cache_dtype not in CACHE_FORMATS:
            raise ConfigError(
                f"tree speculation does not support KV caches in {layer.impl.kv_cache_dtype} (layer {name}): "
                "use --kv-cache-dtype auto or fp8"
            )


def _other_mechanism(layer: Any, also: tuple[type, ...]) -> str | None:
    """Return why a tree mask over keys and values cannot express the layer's attention, or None."""
    if isinstance(layer, MambaBase):
        return "has a recurrent state, which cannot be rolled back to the accepted tokens"
    if isinstance(layer, MLAAttention) and MLAAttention in also:
        return _other_latents(layer)
    if not isinstance(layer, Attention):
        return "does not keep one key and one value per KV head and token"
    if layer.attn_type == AttentionType.ENCODER_DECODER:
        return "attends to the output of an encoder"
    if layer.attn_type != AttentionType.DECODER:
        return "attends to later tokens too"
    # vLLM describes every other rule of the keys that a token sees, or that are kept, as a KV cache of another kind.
    if type(layer).get_kv_cache_spec is not Attention.get_kv_cache_spec and type(layer) not in also:
        return "does not show a token all tokens before it, or the last ones only"
    if layer.head_size_v != layer.head_size:
        return f"has keys of size {layer.head_size} and values of size {layer.head_size_v}"
    if layer.use_alibi_sqrt:
        return "has position biases that grow with the square root of the distance"
    return None


def _other_latents(layer: Any) -> str | None:
    """Return why a tree mask over latents cannot express what this layer of MLA does, or None."""
    if layer.use_sparse or layer.indexer is not None:
        return "reads only the tokens that its indexer selects"
    if getattr(layer, "sliding_window", None) is not None or getattr(layer, "non_causal_multi_token_decode", False):
        return "does not show a token all tokens before it"
    return None
