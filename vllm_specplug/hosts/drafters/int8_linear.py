"""Linear layers of drafters in 8 bits, on CPUs that multiply such numbers (VNNI), with the host's own oneDNN kernels.

A draft decides how far a step gets and never which token is picked, so a drafter need not be exact.  Weights are
rounded once per output channel, inputs per row at each call; sums are exact.
"""

from __future__ import annotations

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

#: Compiled shapes that oneDNN keeps of a layer.
_KEPT_SHAPES = 32
_LARGEST = 127


def can_quantise() -> bool:
    """Whether this machine and its host have what it takes."""
    return hasattr(torch.ops._C, "create_onednn_scaled_mm_handler") and torch.cpu._is_vnni_supported()


class Int8Linear:
    """``x @ weight.T``, both rounded to 8 bits.

    Args:
        weight: bfloat16 or float32 ``[num_outputs, num_inputs]``; not kept.
    """

    def __init__(self, weight: torch.Tensor):
        scales = (weight.float().abs().amax(dim=1, keepdim=True) / _LARGEST).clamp(min=1e-12)
        rounded = (weight.float() / scales).round().to(torch.int8)
        self._num_outputs, self._dtype = weight.shape[0], weight.dtype
        self._scales = scales  # the handler points at them
        self._handler = ops.create_onednn_scaled_mm(rounded.t(), scales, weight.dtype, True, False, _KEPT_SHAPES)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``[num_rows, num_inputs]`` -> ``[num_rows, num_outputs]``."""
        rounded, scales, _ = ops.onednn_scaled_int8_quant(x, None, None, True)
        output = torch.empty((x.shape[0], self._num_outputs), dtype=self._dtype)
        return ops.onednn_scaled_mm(self._handler, rounded, output, scales, None, None, bias)


class RoundedLinearMethod(UnquantizedLinearMethod):
    """What a layer of the host's does with its weights: it loads them as they are, and rounds them."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.rounded = Int8Linear(layer.weight.data)
        layer.weight = torch.nn.Parameter(layer.weight.new_empty(0), requires_grad=False)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return layer.rounded(x, bias)


def quantise_layers(model: torch.nn.Module, besides: tuple[str, ...] = ()) -> None:
    """Before its weights are read: linear layers of ``model`` are to be rounded, those so called aside."""
    for name, layer in model.named_modules():
        plain = isinstance(layer, LinearBase) and type(layer.quant_method) is UnquantizedLinearMethod
        if plain and name.rpartition(".")[2] not in besides:
            layer.quant_method = RoundedLinearMethod()
