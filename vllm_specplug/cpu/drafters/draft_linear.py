"""vLLM's linear layers for ``kernels.draft_layer``."""

from __future__ import annotations

from typing import Any

from vllm_specplug.cpu.kernels.draft_layer import DraftLinear


def draft_linear(layer: Any) -> DraftLinear | None:
    """Return a layer of vLLM for ``DraftLayer``.

    None: the layer is neither in 8 bits nor one of ``linear_rows`` for all rows, or the operators cannot be built.
    """
    bias, quantised = getattr(layer, "bias", None), getattr(layer, "quantised", None)
    if quantised is not None:
        return DraftLinear(quantised.packed, None, bias, quantised.num_outputs, quantised.scales)
    operands = getattr(getattr(layer, "cpu_linear", None), "operands", None)
    if operands is None:
        return None
    packed, codes, outputs = operands
    return DraftLinear(packed, codes, bias, outputs)
