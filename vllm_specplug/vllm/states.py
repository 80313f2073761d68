"""vLLM's layers with recurrent states on both platforms: their caches, and requests of a step by themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.kv_cache_interface import MambaSpec

#: Fields of ``CommonAttentionMetadata`` of the whole batch, which a part of it must not have.
NO_CACHES: dict[str, Any] = {
    "_num_computed_tokens_cache": None,
    "_token_to_req_indices_cache": None,
    "positions": None,
    "encoder_seq_lens": None,
    "encoder_seq_lens_cpu": None,
}


def specs_for_trees(specs: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's KV cache specs with one state per request, and with prompts in chunks that end at cached states.

    Mamba-2 asks for states from inside of a chunk, which vLLM's CPU code does not give (``IndexError`` in vLLM 0.32).
    """
    wanted = {"num_speculative_blocks": 0, "num_prefill_checkpoint_blocks": 0}
    return {
        name: replace(spec, **{one: value for one, value in wanted.items() if hasattr(spec, one)})
        if isinstance(spec, MambaSpec)
        else spec
        for name, spec in specs.items()
    }


def state_bytes(layer: MambaBase) -> int:
    """Return the size of one state."""
    shapes, dtypes = layer.get_state_shape(), layer.get_state_dtype()
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))


def by_state(layers: Mapping[str, Any]) -> tuple[dict[str, MambaBase], dict[str, Any]]:
    """Split vLLM's layers (by name) into those with a recurrent state and others."""
    with_states = {name: layer for name, layer in layers.items() if isinstance(layer, MambaBase)}
    return with_states, {name: layer for name, layer in layers.items() if name not in with_states}
