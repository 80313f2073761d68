"""The target's LM head and embedding as drafters use them: of any weight format, and without LoRA adapters.

Drafts come from the base model: an adapter's rows are mapped to the rows of the target's forward, which a drafter's
forward does not have.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.model_executor.layers.quantization.base_config import method_has_implemented_embedding

#: Rows of the identity matrix that are multiplied at once by a head that returns no single rows of its weights.
IDENTITY_ROWS = 64


def base_layer(layer: Any) -> Any:
    """Return the layer without the wrapper that adds adapters."""
    return layer.base_layer if isinstance(layer, BaseLayerWithLoRA) else layer


class TargetHead:
    """The LM head of a loaded target.

    Args:
        language_model: vLLM's model, with ``lm_head`` and ``compute_logits``.
        hidden_size, dtype: of the inputs.

    Attributes:
        device: of the weights.
        gathers: whether ``rows`` reads only the rows that are asked for.  Otherwise it takes a forward of the head over
            ``hidden_size`` rows.
    """

    def __init__(self, language_model: torch.nn.Module, hidden_size: int, dtype: torch.dtype):
        self._model, self._layer = language_model, base_layer(language_model.lm_head)
        self._hidden_size, self._dtype = hidden_size, dtype
        self.device = next(self._layer.parameters()).device
        self.gathers = method_has_implemented_embedding(type(self._layer.quant_method))

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the weights of these tokens, dequantised: int64 ``[n]`` -> ``[n, hidden_size]``."""
        method = self._layer.quant_method
        if self.gathers:
            return method.embedding(self._layer, token_ids).to(self._dtype)
        identity = torch.eye(self._hidden_size, dtype=self._dtype, device=self.device)
        columns = [method.apply(self._layer, some)[:, token_ids] for some in identity.split(IDENTITY_ROWS)]
        return torch.cat(columns).T.contiguous()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the base model's logits: ``[num_rows, hidden_size]`` -> ``[num_rows, vocab_size]``."""
        processor = getattr(self._model, "logits_processor", None)
        if isinstance(processor, BaseLayerWithLoRA):
            return processor.base_layer(self._layer, hidden)
        return self._model.compute_logits(hidden)
