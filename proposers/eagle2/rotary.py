"""Rotary positions of a draft head: read from Hugging Face configs, and computed as vLLM computes them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

#: Numbers of ``rope_of``, as items.
Rope = tuple[tuple[str, Any], ...]
#: Scalings that depend on nothing but the config, and that vLLM and transformers compute alike.
SCALINGS = ("linear", "llama3", "yarn")
#: Further keys that vLLM reads; text has the same positions in all sections.
_ALSO_KEPT = ("mrope_section", "mrope_interleaved")
_KEYS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings"),
}


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters of a head whose config, or whose target's config, this is.

    A head rotates all dimensions of its one layer.  So of a target that rotates some, or in other ways by layer, or
    with another scaling, only the base is kept: a head need not rotate as its target does, but training and serving
    must rotate alike.

    Returns:
        ``rope_type``, ``rope_theta`` and the type's own entries, as ``rope_parameters`` of a config.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if given and all(isinstance(value, dict) for value in given.values()):  # by type of layer
        given = given.get("full_attention") or next(iter(given.values()))
    kind = given.get("rope_type") or given.get("type") or "default"
    kept = [key for key in (*_KEYS.get(kind, ()), *_ALSO_KEPT) if given.get(key) is not None]
    theta = config.get("rope_theta") or given.get("rope_theta") or 10000.0
    if kind not in SCALINGS or any(given.get(key) is not None for key in ("mscale", "mscale_all_dim")):
        kind, kept = "default", [key for key in kept if key in _ALSO_KEPT]
    return {"rope_type": kind, "rope_theta": theta} | {key: given[key] for key in kept}


def numbers_of(config: dict[str, Any]) -> Rope:
    """Return the arguments of ``table`` from a config."""
    return tuple((key, value) for key, value in rope_of(config).items() if key not in _ALSO_KEPT)


@cache
def _frequencies(head_dim: int, rope: Rope) -> tuple[torch.Tensor, float]:
    """Return the angle per position, float32 ``[head_dim / 2]``, and the factor of sine and cosine."""
    parameters = dict(rope)
    if parameters["rope_type"] == "default":
        half = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / parameters["rope_theta"] ** half, 1.0
    sizes = {"hidden_size": head_dim, "num_attention_heads": 1, "head_dim": head_dim}
    if original := parameters.get("original_max_position_embeddings"):
        sizes["max_position_embeddings"] = original
    config = LlamaConfig(**sizes, rope_parameters=parameters)
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))


def table(head_dim: int, rope: Rope, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, float32 ``[T, head_dim]`` on the positions' device, of integer positions ``[T]``."""
    frequencies, factor = _frequencies(head_dim, rope)
    angles = positions.float()[:, None] * frequencies.to(positions.device)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos() * factor, angles.sin() * factor
