"""Rotary positions of models for which vLLM's operator on a CPU is wrong."""

from __future__ import annotations

from typing import Any

import torch

from vllm_specplug.config import ConfigError


def check_rotary_positions(model: torch.nn.Module) -> None:
    """Let the first forward refuse a model whose rotary positions vLLM computes wrongly.

    On a CPU, vLLM 0.32's operator takes ``[num_tokens, num_heads, size]`` for one head, and a key for contiguous.  So
    its results depend on the number of rows.  MLA and LFM2 give it such queries.  Compiled models and those with YaRN
    positions use torch, which is right.

    Args:
        model: the target; its first forward raises ``ConfigError``, naming the module.
    """
    for name, module in model.named_modules():
        rotary = getattr(module, "rotary_emb", None)
        if getattr(rotary, "_forward_method", None) not in (None, getattr(rotary, "forward_native", None)):
            _check_when_called(name, rotary)


def _check_when_called(name: str, rotary: Any) -> None:
    def check(_: Any, given: tuple[torch.Tensor, ...]) -> None:
        handle.remove()
        _, query, key = given[:3]
        if query.dim() == 3 and not _rotates_rightly(rotary, query, key):
            raise ConfigError(
                f"vLLM's operator for rotary positions is wrong for queries of three dimensions ({name}), also without "
                "speculation: leave out --enforce-eager, or add --compilation-config "
                '\'{"custom_ops": ["-rotary_embedding"]}\''
            )

    handle = rotary.register_forward_pre_hook(check)


def _rotates_rightly(rotary: Any, query: torch.Tensor, key: torch.Tensor) -> bool:
    """Compare on random numbers with vLLM's torch code: queries and keys that lie in wider rows, of these sizes."""
    generator, positions = torch.Generator().manual_seed(0), torch.tensor([3, 5, 9])
    wide = [torch.randn(3, one.shape[1], one.shape[2] + 16, generator=generator) for one in (query, key)]
    parts = [rows[..., 16:] for rows in wide]
    expected = rotary.forward_native(positions, *(part.clone() for part in parts))
    found = rotary._forward_method(positions, *parts)
    return all(torch.allclose(*pair, atol=1e-2) for pair in zip(found, expected, strict=True))
