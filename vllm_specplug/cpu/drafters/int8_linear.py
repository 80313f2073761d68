"""Linear layers of drafters in 8 bits, on CPUs that multiply such numbers (``kernels.byte_linear``)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

from vllm_specplug.cpu.kernels.byte_linear import ByteLinear, can_multiply_bytes


class Int8LinearMethod(UnquantizedLinearMethod):
    """Quantises a vLLM layer's weights once they are loaded; they stay as they are if the operators cannot be built.

    Args:
        parts: of the layer's inputs, see ``ByteLinear``.
    """

    def __init__(self, parts: int = 1):
        super().__init__()
        self._parts = parts

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.quantised = ByteLinear(layer.weight.data, self._parts) if can_multiply_bytes() else None
        if layer.quantised is None:
            return super().process_weights_after_loading(layer)
        layer.weight = torch.nn.Parameter(layer.weight.new_empty(0), requires_grad=False)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return super().apply(layer, x, bias) if layer.quantised is None else layer.quantised(x, bias)


def quantise_layers(model: torch.nn.Module, parts: Mapping[str, int]) -> None:
    """Mark the linear layers of ``model`` to be quantised at loading.

    Args:
        parts: of a layer's inputs, by the last part of its name, see ``ByteLinear``; 1 if it is not there.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, LinearBase) and type(layer.quant_method) is UnquantizedLinearMethod:
            layer.quant_method = Int8LinearMethod(parts.get(name.rpartition(".")[2], 1))
