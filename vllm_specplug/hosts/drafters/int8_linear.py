"""Linear layers of drafters in 8 bits, on CPUs that multiply such numbers (VNNI), with vLLM's own oneDNN kernels.

A draft decides how many tokens a step emits and never which ones, so that a drafter need not be exact.  Weights are
quantised once per output channel, inputs per row at each call; sums are exact.
"""

from __future__ import annotations

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

#: Compiled shapes that oneDNN caches per layer.
_KEPT_SHAPES = 32
_LARGEST = 127


def can_quantise() -> bool:
    """Return whether this CPU and this vLLM support it."""
    return hasattr(torch.ops._C, "create_onednn_scaled_mm_handler") and torch.cpu._is_vnni_supported()


class Int8Linear:
    """Computes ``x @ weight.T`` with both quantised to 8 bits.

    Args:
        weight: bfloat16 or float32 ``[num_outputs, num_inputs]``; not kept.
    """

    def __init__(self, weight: torch.Tensor):
        scales = (weight.float().abs().amax(dim=1, keepdim=True) / _LARGEST).clamp(min=1e-12)
        quantised = (weight.float() / scales).round().to(torch.int8)
        self.num_outputs, self._dtype = weight.shape[0], weight.dtype
        self._scales = scales  # the handler holds their address
        self._handler = ops.create_onednn_scaled_mm(quantised.t(), scales, weight.dtype, True, False, _KEPT_SHAPES)

    @property
    def handle(self) -> torch.Tensor:
        """Int64 ``[]``; address of the packed weights, read at each call.  The tensor stays the same."""
        return self._handler.handler_tensor

    def exchange_scales(self, other: Int8Linear) -> None:
        """Keep the scales with the packed weights, when the contents of ``handle`` were exchanged."""
        self._scales, other._scales = other._scales, self._scales

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``[num_rows, num_inputs]`` -> ``[num_rows, num_outputs]``."""
        quantised, scales, _ = ops.onednn_scaled_int8_quant(x, None, None, True)
        output = torch.empty((x.shape[0], self.num_outputs), dtype=self._dtype)
        return ops.onednn_scaled_mm(self._handler, quantised, output, scales, None, None, bias)


class Int8LinearMethod(UnquantizedLinearMethod):
    """Quantises a vLLM layer's weights after it has loaded them."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.quantised = Int8Linear(layer.weight.data)
        layer.weight = torch.nn.Parameter(layer.weight.new_empty(0), requires_grad=False)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return layer.quantised(x, bias)


def quantise_layers(model: torch.nn.Module, besides: tuple[str, ...] = ()) -> None:
    """Mark the linear layers of ``model`` to be quantised at loading, except those named in ``besides``."""
    for name, layer in model.named_modules():
        plain = isinstance(layer, LinearBase) and type(layer.quant_method) is UnquantizedLinearMethod
        if plain and name.rpartition(".")[2] not in besides:
            layer.quant_method = Int8LinearMethod()
