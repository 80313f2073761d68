"""LM heads of drafters: on a CPU in 8 bits, or packed as vLLM packs its own linear layers."""

from __future__ import annotations

from functools import cached_property

import torch
from torch.nn import functional as F
from vllm.model_executor.layers import utils

from vllm_specplug.cpu.drafters.draft_linear import draft_linear
from vllm_specplug.cpu.kernels.byte_linear import ByteLinear, can_multiply_bytes
from vllm_specplug.cpu.kernels.draft_layer import DraftLinear


class DraftHead(torch.nn.Module):
    """Computes logits over a draft vocabulary.

    Args:
        weight: ``[draft_vocab, hidden_size]``, in the dtype of the hidden states.
        in_int8: whether weights and hidden states are quantised, if the operators can be built.
    """

    def __init__(self, weight: torch.Tensor, in_int8: bool = False):
        super().__init__()
        self.quantised = ByteLinear(weight) if in_int8 and can_multiply_bytes() else None
        if self.quantised is not None:
            return
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.cpu_linear = F.linear  # the name that vLLM's packing sets
        if weight.device.type == "cpu":
            utils.dispatch_cpu_unquantized_gemm(self, remove_weight=True)  # inside `row_linear_layers` it is theirs

    @cached_property
    def linear(self) -> DraftLinear | None:
        """The head for ``DraftLayer``, see ``draft_linear``."""
        return draft_linear(self)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[num_rows, hidden_size]`` -> ``[num_rows, draft_vocab]``."""
        if self.quantised is not None:
            return self.quantised(hidden)
        return self.cpu_linear(hidden, self.weight, None)
