"""LM heads of drafters: on a CPU packed as the host packs its own linear layers."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm


class DraftHead(torch.nn.Module):
    """Logits over a draft vocabulary.

    Args:
        weight: ``[draft_vocab, hidden_size]``, in the dtype of the hidden states.
    """

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.cpu_linear = F.linear  # the name that the host's packing sets
        if weight.device.type == "cpu":
            dispatch_cpu_unquantized_gemm(self, remove_weight=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[num_rows, hidden_size]`` -> ``[num_rows, draft_vocab]``."""
        return self.cpu_linear(hidden, self.weight, None)
