"""Convolution and recurrence of vLLM's layers with states, by kind of layer, in our operators.

A hook puts them in the place of vLLM's kernels, for rows of prompts, of plain decoding and of trees.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.platforms import current_platform
from vllm.utils import torch_utils

from vllm_specplug.config import ConfigError
from vllm_specplug.cpu.kernels.state_scan import MOST_TAPS, Sequences, causal_conv, gated_delta, mamba2_scan
from vllm_specplug.cpu.states import Core, States, StateStep, compute

_LAYERS = "vllm.model_executor.layers.mamba"
_SILU = ("silu", "swish")


def _float(rows: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Return rows as contiguous float32, ``[num_rows, *sizes]`` if sizes are given."""
    return (rows.reshape(len(rows), *sizes) if sizes else rows).float().contiguous()


class _Convolution:
    """The convolution of a layer; vLLM packs the weights of some for its own kernel."""

    def __init__(self, name: str, module: Any, activation: str | None):
        weight = getattr(module, "_cpu_unpacked_conv_weight", module.weight).detach()
        self._weight = _float(weight.flatten(1).T)
        self._bias = None if module.bias is None else _float(module.bias.detach())
        self._activates = activation in _SILU
        if len(self._weight) > MOST_TAPS or activation not in (None, *_SILU):
            raise ConfigError(
                f"tree speculation does not support the convolution of {name}, over {len(self._weight)} inputs with "
                f"activation {activation!r}: serve this model without speculation"
            )

    def __call__(
        self, rows: torch.Tensor, before: torch.Tensor, after: torch.Tensor, sequences: Sequences
    ) -> torch.Tensor:
        """Convolve ``[num_rows, channels]``; returns float32."""
        windows = [one.transpose(1, 2) if is_conv_state_dim_first() else one for one in (before, after)]
        return causal_conv(_float(rows), self._weight, self._bias, *windows, sequences, self._activates)


def _gated_delta(name: str, layer: Any) -> Core:
    convolve = _Convolution(name, layer.conv1d, layer.activation)
    a_log, dt_bias = _float(layer.A_log.detach()), _float(layer.dt_bias.detach())
    key_size, value_size = layer.key_dim // layer.tp_size, layer.value_dim // layer.tp_size

    def core(
        sequences: Sequences, before: States, after: States, inputs: Sequence[torch.Tensor], output: torch.Tensor
    ) -> None:
        mixed, b, a = inputs
        rows = convolve(mixed, before[0], after[0], sequences)
        query, key, value = rows.split([key_size, key_size, value_size], dim=-1)
        query, key = (_float(one, -1, layer.head_k_dim) for one in (query, key))
        # vLLM gives the two sizes of a head in the other order.
        states = [one[1].view(-1, one[1].shape[1], layer.head_k_dim, layer.head_v_dim) for one in (before, after)]
        numbers = _float(value, -1, layer.head_v_dim), _float(a), _float(b)
        output.copy_(gated_delta(query, key, *numbers, a_log, dt_bias, *states, sequences))

    return core


def _mamba2(name: str, layer: Any) -> Core:
    convolve = _Convolution(name, layer.conv1d, layer.activation)
    a, d, dt_bias = (_float(one.detach().flatten()) for one in (layer.A, layer.D, layer.dt_bias))
    state_size, inner = layer.ssm_state_size, layer.tped_intermediate_size
    of_groups = layer.n_groups // layer.tp_size * state_size

    def core(
        sequences: Sequences, before: States, after: States, inputs: Sequence[torch.Tensor], output: torch.Tensor
    ) -> None:
        mixed, dt = inputs[0][:, inner:].split([layer.tped_conv_size, layer.tped_dt_size], dim=-1)
        rows = convolve(mixed, before[0], after[0], sequences)
        x, b, c = rows.split([inner, of_groups, of_groups], dim=-1)
        b, c = (_float(one, -1, state_size) for one in (b, c))
        x = _float(x, -1, layer.head_dim)
        scanned = mamba2_scan(x, _float(dt), a, b, c, d, dt_bias, before[1], after[1], sequences)
        output.copy_(scanned.view(output.shape))

    return core


def _short_conv(name: str, layer: Any) -> Core:
    convolve = _Convolution(name, layer.conv, None)

    def core(
        sequences: Sequences, before: States, after: States, inputs: Sequence[torch.Tensor], output: torch.Tensor
    ) -> None:
        rows, gate = inputs
        output.copy_(gate * convolve(rows, before[0], after[0], sequences).to(gate.dtype))

    return core


#: ``run(inputs, output)`` computes a layer in the forward, and returns whether it did: a profile run has no states.
_Run = Callable[[Sequence[torch.Tensor], torch.Tensor], bool]


def _runner(name: str, layer: Any, core: Core) -> _Run:
    def run(inputs: Sequence[torch.Tensor], output: torch.Tensor) -> bool:
        step = (get_forward_context().attn_metadata or {}).get(name)
        if isinstance(step, StateStep):
            compute(name, layer.kv_cache, step, core, inputs, output)
        return isinstance(step, StateStep)

    return run


def _hook_mamba2(layer: Any, run: _Run) -> None:
    original = layer.conv_ssm_forward

    @functools.wraps(original)
    def conv_ssm_forward(projected_states: torch.Tensor, output: torch.Tensor) -> Any:
        if not run([projected_states], output):
            return original(projected_states, output)

    layer.conv_ssm_forward = conv_ssm_forward


def _hook_short_conv(layer: Any, run: _Run) -> None:
    original = layer.forward_native

    @functools.wraps(original)
    def forward_native(hidden_states: torch.Tensor, output: torch.Tensor) -> Any:
        before, after, x = layer.in_proj(hidden_states)[0].chunk(3, dim=-1)
        convolved = torch.zeros_like(x)
        if not run([before * x, after], convolved):
            return original(hidden_states, output)
        output.copy_(layer.out_proj(convolved)[0])

    layer.forward_native = forward_native


#: Layers with the gated delta rule that our operators compute.
_GATED_DELTA: WeakKeyDictionary[Any, _Run] = WeakKeyDictionary()


@functools.cache
def _take_over_operator() -> None:
    """Replace vLLM's custom operator of the gated delta rule: the layer has no method for it."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    def operator(mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any, layer_name: Any) -> None:
        layer = get_forward_context().no_compile_layers[torch_utils._resolve_layer_name(layer_name)]
        run = _GATED_DELTA.get(layer)
        if run is None or not run([mixed_qkv, b, a], core_attn_out):
            gdn_attention.cpu_gdn_attention_core(mixed_qkv, b, a, core_attn_out, layer_name)

    key = current_platform.dispatch_key
    torch_utils.vllm_lib.impl("cpu_gdn_attention_core", operator, dispatch_key=key, allow_override=True)


def _hook_gated_delta(layer: Any, run: _Run) -> None:
    _take_over_operator()
    _GATED_DELTA[layer] = run


def _kind(layer: MambaBase) -> tuple[Callable[[str, Any], Core], Callable[[Any, _Run], None]] | None:
    if getattr(layer, "_forward_method", None) == getattr(layer, "forward_cpu", 0):
        return _gated_delta, _hook_gated_delta
    return {
        f"{_LAYERS}.mamba_mixer2.MambaMixer2": (_mamba2, _hook_mamba2),
        f"{_LAYERS}.short_conv.ShortConv": (_short_conv, _hook_short_conv),
    }.get(f"{type(layer).__module__}.{type(layer).__qualname__}")


def hook(name: str, layer: MambaBase) -> Core:
    """Let our operators compute a layer; return its core.

    Raises:
        ConfigError: naming the layer, if it is of a kind that is not served.
    """
    if (kind := _kind(layer)) is None:
        raise ConfigError(
            f"tree speculation does not know the layer {name} ({type(layer).__name__}), which has a recurrent state; "
            "serve this model without speculation"
        )
    make, put = kind
    core = make(name, layer)
    put(layer, _runner(name, layer, core))
    return core
