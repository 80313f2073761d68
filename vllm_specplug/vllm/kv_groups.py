"""Target layers by KV cache group: vLLM gives each group block tables and slot mappings of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch


@dataclass(frozen=True)
class AlikeLayers:
    """Layers of one KV cache group whose caches have the same shape, strides, dtype and packing.

    Attributes:
        group: index of the group.
        layers: by name.
    """

    group: int
    layers: dict[str, Any]

    @cached_property
    def caches(self) -> list[torch.Tensor]:
        """The layers' caches, ``[num_blocks, num_kv_heads, block_size, content]`` each."""
        caches = [layer.kv_cache for layer in self.layers.values()]
        return [cache.unsqueeze(1) if cache.ndim == 3 else cache for cache in caches]  # latents have no heads


def alike_layers(kv_cache_config: Any, layers: Mapping[str, Any]) -> list[AlikeLayers]:
    """Sort ``layers`` (by name) so that one call can commit all of an entry.

    A layer that uses the cache of another one is left out: the other one's commit serves it.
    """
    found: dict[Any, AlikeLayers] = {}
    for group, spec in enumerate(kv_cache_config.kv_cache_groups):
        for name in spec.layer_names:
            layer = layers.get(name)
            if layer is None or layer.impl.kv_sharing_target_layer_name is not None:
                continue
            cache = layer.kv_cache
            kind = (group, cache.shape, cache.stride(), cache.dtype, getattr(layer, "isa", None))
            found.setdefault(kind, AlikeLayers(group, {})).layers[name] = layer
    return list(found.values())


def groups_by_layer(kv_cache_config: Any) -> dict[str, int]:
    """Return the index of each layer's KV cache group."""
    groups = enumerate(kv_cache_config.kv_cache_groups)
    return {name: group for group, spec in groups for name in spec.layer_names}
