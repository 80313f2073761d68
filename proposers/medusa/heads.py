"""The Medusa heads as a plain torch module, for serving, training and calibration.

    head k:  x = h;  x = x + SiLU(W x + b), once per layer;  logits = LM head (x)

``h`` is the target's hidden state, the input of its LM head.  Training starts with ``W`` and ``b`` zero, so that each
head predicts the same as the target's LM head (Medusa, section 2.1.1).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional as F


class MedusaHeads(nn.Module):
    """The residual blocks of all heads, stacked so that one matrix product serves all heads.

    Attributes:
        weight: ``[num_layers, num_heads, hidden_size, hidden_size]``.
        bias: ``[num_layers, num_heads, hidden_size]``.
        lm_heads: ``[num_heads, draft_vocab, hidden_size]`` if the heads have LM heads of their own, else None.
    """

    def __init__(self, num_heads: int, num_layers: int, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_layers, num_heads, hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.zeros(num_layers, num_heads, hidden_size))
        self.register_parameter("lm_heads", None)

    @property
    def num_heads(self) -> int:
        return self.weight.shape[1]

    @property
    def num_layers(self) -> int:
        return self.weight.shape[0]

    def add_lm_heads(self, draft_head: torch.Tensor) -> None:
        """Give each head a copy of ``draft_head`` (``[draft_vocab, hidden_size]``) to train."""
        self.lm_heads = nn.Parameter(draft_head.to(self.weight).repeat(self.num_heads, 1, 1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[num_rows, hidden_size]`` -> inputs of the LM heads, ``[num_rows, num_heads, hidden_size]``."""
        first, *rest = range(self.num_layers)
        # The first layer has the same input in all heads: one matrix product.
        change = F.linear(hidden, self.weight[first].flatten(0, 1), self.bias[first].flatten())
        x = hidden.unsqueeze(1) + F.silu(change.unflatten(1, (self.num_heads, -1)))
        for layer in rest:
            change = torch.baddbmm(self.bias[layer].unsqueeze(1), x.transpose(0, 1), self.weight[layer].mT)
            x = x + F.silu(change).transpose(0, 1)
        return x

    def checkpoint_state(self) -> dict[str, torch.Tensor]:
        """Tensors with the names of checkpoints, see ``checkpoint``."""
        state = {}
        for head in range(self.num_heads):
            for layer in range(self.num_layers):
                state[f"{head}.{layer}.linear.weight"] = self.weight.detach()[layer, head]
                state[f"{head}.{layer}.linear.bias"] = self.bias.detach()[layer, head]
            if self.lm_heads is not None:
                state[f"{head}.{self.num_layers}.weight"] = self.lm_heads.detach()[head]
        return state


def heads_from_state(
    state: Mapping[str, torch.Tensor], num_heads: int, num_layers: int, dtype: torch.dtype = torch.float32
) -> MedusaHeads:
    """Build the first ``num_heads`` heads of a checkpoint's tensors, with their LM heads, in ``dtype``."""
    heads = MedusaHeads(num_heads, num_layers, state["0.0.linear.weight"].shape[1]).to(dtype)
    with torch.no_grad():
        for head in range(num_heads):
            for layer in range(num_layers):
                heads.weight[layer, head] = state[f"{head}.{layer}.linear.weight"]
                heads.bias[layer, head] = state[f"{head}.{layer}.linear.bias"]
        own = [state.get(f"{head}.{num_layers}.weight") for head in range(num_heads)]
        if own[0] is not None:
            heads.lm_heads = nn.Parameter(torch.stack(own).to(dtype))
    return heads
