"""The gated delta rule in float32: vLLM's operators on a CPU take bfloat16 only.

``in_float32`` puts these in the place of vLLM's operators, in the module of its layer; the layer is vLLM's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm._custom_ops as ops
from torch.nn.functional import normalize, softplus
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention


def gating(A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return decay and learning rate: ``[num_tokens, num_heads]`` both."""
    return -A_log.float().exp() * softplus(a.float() + dt_bias.float()), b.float().sigmoid()


def scan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    states: torch.Tensor,
    places: torch.Tensor,
    starts: torch.Tensor,
) -> torch.Tensor:
    """Run sequences token by token; states are updated in place.

    Args:
        query, key: ``[num_tokens, num_key_heads, head_size]``.
        value: ``[num_tokens, num_heads, value_size]``.
        decay, rate: ``[num_tokens, num_heads]``.
        states: ``[num_places, num_heads, head_size, value_size]``.
        places: int ``[num_sequences]``; of their states.
        starts: int ``[num_sequences + 1]``; rows of the sequences.

    Returns:
        Like ``value``.
    """
    repeats, output = value.shape[1] // key.shape[1], torch.empty_like(value)
    query, key = (normalize(one, dim=-1, eps=1e-6).repeat_interleave(repeats, 1) for one in (query, key))
    for place, first, last in zip(places.tolist(), starts[:-1].tolist(), starts[1:].tolist(), strict=False):
        state = states[place]
        for token in range(first, last):
            state = state * decay[token].exp()[:, None, None]
            read = torch.einsum("hkv,hk->hv", state, key[token])
            change = (value[token] - read) * rate[token][:, None]
            state = state + key[token][:, :, None] * change[:, None]
            output[token] = torch.einsum("hkv,hk->hv", state, query[token]) * query.shape[-1] ** -0.5
        states[place] = state
    return output


def decode(
    A_log: Any, dt_bias: Any, q: Any, k: Any, v: Any, a: Any, b: Any, initial_state_source: Any, **rest: Any
) -> Any:
    rows = (one.reshape(-1, *one.shape[-2:]) for one in (q, k, v))
    places, starts = rest["initial_state_indices"], rest["cu_seqlens"]
    return scan(*rows, *gating(A_log, a, b, dt_bias), initial_state_source, places, starts).unsqueeze(1)


def prefill(query: Any, key: Any, value: Any, g: Any, beta: Any, initial_state: Any, **rest: Any) -> Any:
    rows = (one.reshape(-1, *one.shape[-2:]) for one in (query, key, value, g.unsqueeze(-1), beta.unsqueeze(-1)))
    query, key, value, g, beta = rows
    places, starts = rest["initial_state_indices"], rest["cu_seqlens"]
    output = scan(query, key, value, g.squeeze(-1), beta.squeeze(-1), initial_state, places, starts)
    return output.unsqueeze(0), initial_state


class _Like:
    """A module with some names replaced."""

    def __init__(self, module: Any, **replaced: Any):
        self.__dict__.update(replaced)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def in_float32(patch: pytest.MonkeyPatch) -> None:
    """Let vLLM's layers with the gated delta rule serve float32."""
    cpu = SimpleNamespace(_is_avx512_bf16_supported=lambda: False, _is_amx_tile_supported=lambda: False)
    patch.setattr(gdn_attention, "torch", _Like(torch, bfloat16=torch.float32, cpu=cpu))
    replaced = {
        "fused_sigmoid_gating_delta_rule_update_cpu": decode,
        "chunk_gated_delta_rule_cpu": prefill,
        "fused_gdn_gating_cpu": gating,
    }
    patch.setattr(gdn_attention, "ops", _Like(ops, **replaced))
