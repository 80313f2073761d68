"""vLLM's layer with the gated delta rule as on CUDA, on a CPU: plain torch in the place of vLLM's Triton kernels.

The layer's own code runs, with convolution by vLLM's operators for CPUs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import normalize
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as module

from tests.doubles.gated_delta import gating, scan


def _after_convolution(conv_output: Any, a: Any, b: Any, A_log: Any, dt_bias: Any, **sizes: Any) -> Any:
    keys, heads = sizes["num_k_heads"], A_log.shape[0]
    key_size, value_size = sizes["head_k_dim"], sizes["head_v_dim"]
    query, key, value = conv_output.split([keys * key_size, keys * key_size, heads * value_size], dim=-1)
    query, key = (normalize(one.view(-1, keys, key_size), dim=-1, eps=1e-6) for one in (query, key))
    return query, key, value.view(-1, heads, value_size), *gating(A_log, a, b, dt_bias)


def _prefill(q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, cu_seqlens: Any, **_: Any) -> Any:
    states = initial_state.clone()
    places = torch.arange(len(states))
    output = scan(q[0], k[0], v[0], g[0], beta[0], states.transpose(-1, -2), places, cu_seqlens)
    return output.unsqueeze(0), states


def _decode(A_log: Any, a: Any, b: Any, dt_bias: Any, q: Any, k: Any, v: Any, initial_state: Any, **rest: Any) -> Any:
    places, starts = rest["ssm_state_indices"].flatten(), rest["cu_seqlens"]
    states = initial_state.transpose(-1, -2)
    return scan(q[0], k[0], v[0], *gating(A_log, a, b, dt_bias), states, places, starts).unsqueeze(0), initial_state


def _packed_decode(mixed_qkv: Any, a: Any, b: Any, A_log: Any, dt_bias: Any, **rest: Any) -> None:
    states, out = rest["initial_state"], rest["out"]
    _, heads, value_size, key_size = states.shape
    keys = (mixed_qkv.shape[1] - heads * value_size) // (2 * key_size)
    sizes = {"num_k_heads": keys, "head_k_dim": key_size, "head_v_dim": value_size}
    rows = _after_convolution(mixed_qkv, a, b, A_log, dt_bias, **sizes)
    places = rest["ssm_state_indices"].flatten()
    out[:, 0] = scan(*rows, states.transpose(-1, -2), places, torch.arange(len(places) + 1))


def as_on_gpus(patch: pytest.MonkeyPatch) -> None:
    """Let layers that are made from now on run vLLM's code for CUDA."""
    layer = module.QwenGatedDeltaNetAttention
    patch.setattr(layer, "forward_cpu", layer.forward_cuda)
    patch.setattr(layer, "_warmup_prefill_kernels", lambda *_: None)
    patch.setattr(module, "fused_post_conv_prep", _after_convolution)
    patch.setattr(module, "fla_chunk_gated_delta_rule", _prefill)
    patch.setattr(module, "fused_sigmoid_gating_delta_rule_update", _decode)
    patch.setattr(module, "fused_recurrent_gated_delta_rule_packed_decode", _packed_decode)
