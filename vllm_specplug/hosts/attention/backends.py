"""What tree attention needs of the host's attention layers, on every runner."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from vllm_specplug.config import ConfigError


@contextlib.contextmanager
def overridden_backends(overrides: Mapping[AttentionBackendEnum, str]) -> Iterator[None]:
    """Attention layers built inside use these classes, by dotted path; other engines of the process do not."""
    selector._cached_get_attn_backend.cache_clear()
    for backend, path in overrides.items():
        register_backend(backend, path)
    try:
        yield
    finally:
        for backend in overrides:
            backend.clear_override()
        selector._cached_get_attn_backend.cache_clear()


def refuse_features(layer_name: str, features: Iterable[tuple[bool, str]]) -> None:
    """Raise ``ConfigError`` for the first feature of a layer's attention that is in use: ``(in use, name)``."""
    for used, feature in features:
        if used:
            raise ConfigError(f"tree speculation does not support {feature} (layer {layer_name}): use another method")
