"""LM heads of drafters, packed as the host packs its own linear layers."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm


class DraftHead(torch.nn.Module):
    """Logits over a draft vocabulary.

    Args:
        weight: ``[draft_vocab, hidden_size]``, in the dtype of the hidden states.
    """

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        dispatch_cpu_unquantized_gemm(self, remove_weight=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[num_rows, hidden_size]`` -> ``[num_rows, draft_vocab]``."""
        return self.cpu_linear(hidden, self.weight, None)
