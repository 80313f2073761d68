"""What all tree attention backends share: how vLLM selects them, their metadata builder, the features they refuse."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from vllm_specplug.config import ConfigError


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


class TreeBuilder:
    """Mixed into a metadata builder of vLLM: its metadata gets a field ``tree``, None at first.

    Attributes:
        metadata: vLLM's metadata class with the field.
    """

    metadata: type

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        return self.metadata(**vars(super().build(common_prefix_len, common_attn_metadata, fast_build)))


def check_attention(layers: Mapping[str, object], implementation: type, fix: str) -> None:
    """Refuse attention layers that tree attention cannot serve.

    Args:
        layers: by name.
        implementation: the tree attention that every layer must have.
        fix: what the user can do about a layer that has another one.

    Raises:
        ConfigError: naming the first layer and feature.
    """
    for name, layer in layers.items():
        impl = getattr(layer, "impl", None)
        if not isinstance(impl, implementation):
            raise ConfigError(
                f"tree speculation does not support the attention of {name} ({type(impl).__name__}): {fix}"
            )
        features = (
            (impl.sliding_window not in (-1, (-1, -1)), "a sliding window"),  # an int on CPUs
            (impl.alibi_slopes is not None, "ALiBi"),
            (getattr(impl, "sinks", None) is not None, "attention sinks"),
            (bool(impl.logits_soft_cap), "a logit soft cap"),
            (impl.kv_cache_dtype.startswith(("fp8", "int", "nvfp4")), "a quantised KV cache"),
            (impl.kv_sharing_target_layer_name is not None, "KV sharing between layers"),
        )
        for used, feature in features:
            if used:
                raise ConfigError(f"tree speculation does not support {feature} (layer {name}): use another method")
