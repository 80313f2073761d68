"""A parallel EAGLE head: one forward predicts the features of several positions (P-EAGLE; DSpark's token above).

The root's row is EAGLE's. Behind it are mask rows, one for each further level, at the following positions. A mask row
reads a learned feature, `mask_hidden`, and the embedding of the mask token, and attends to the accepted rows and to the
mask rows before it. So its output does not depend on the drafted tokens. What it predicts is corrected for each drafted
token above by a small network of two layers, `follow`:

    out'(v) = out + up(silu(down([embed(v); out / rms(out)])))

A level of a tree then costs `follow` and the LM head for each extended node, and no decoder layer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from .head import EagleHead, HeadConfig, rotary_table

#: A linear layer.
Layer = Callable[[torch.Tensor], torch.Tensor]


class ParallelHead(EagleHead):
    """An EAGLE head with mask rows; `aligned` computes them as further passes.

    Args:
        config: geometry.
        mask_embedding: [h], the embedding of the mask token.
        rank: width of the network that reads the token above; 0: there is none.
    """

    def __init__(self, config: HeadConfig, mask_embedding: torch.Tensor, rank: int):
        super().__init__(config)
        hidden = config.hidden_size
        self.register_buffer("mask_embedding", mask_embedding.float(), persistent=False)
        self.mask_hidden = nn.Parameter(torch.zeros(hidden))  # times input_scale, see `mask_input`
        self.follow = TokenAbove(hidden, rank) if rank else None

    def mask_input(self) -> torch.Tensor:
        """fc's output for a mask row: [h]."""
        return self.combine(self.mask_embedding, self.mask_hidden / self.input_scale[self.config.hidden_size :])

    def follows(self, outputs: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """Correct mask rows' outputs [..., h] for the tokens above, whose embeddings are [..., h]."""
        if self.follow is None:
            return outputs
        return self.follow(outputs, embeddings * self.input_scale[: self.config.hidden_size].to(embeddings.dtype))

    def aligned(self, embeddings: torch.Tensor, features: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """Outputs of the root's row and of `steps` - 1 mask rows behind it, each [B, T, h].

        Row t of output j is that of a draft whose root is row t - j, as for EAGLE's passes. The token above it is the
        one at t + 1, whose embedding is row t of `embeddings`.
        """
        outputs = self.parallel(embeddings, features, steps)
        return outputs[:1] + [self.follows(output, embeddings) for output in outputs[1:]]

    def parallel(self, embeddings: torch.Tensor, features: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """As `aligned`, without the tokens above."""
        layer = self.layers[0]
        cos, sin = rotary_table(self.config, torch.arange(features.shape[1], device=features.device))
        outputs: list[torch.Tensor] = []
        keys, values = [], []
        root = self.combine(embeddings, features)
        mask = self.mask_input().to(root.dtype).expand_as(root)
        for x in [root] + [mask] * (steps - 1):
            query, key, value = layer.self_attn.project(x, cos, sin)
            keys.append(key)
            values.append(value)
            outputs.append(layer.finish(x, self.attend(query, keys, values)))
        return outputs

    def folded_state(self) -> dict[str, torch.Tensor]:
        hidden = self.config.hidden_size
        state = super().folded_state() | {"mask_hidden": self.mask_hidden.detach() / self.input_scale[hidden:]}
        if self.follow is not None:
            weight = self.follow.down.weight.detach().clone()
            weight[:, :hidden] *= self.input_scale[:hidden]
            state["follow.down.weight"] = weight
        return state

    @torch.no_grad()
    def unfold(self) -> None:
        super().unfold()
        hidden = self.config.hidden_size
        self.mask_hidden *= self.input_scale[hidden:]
        if self.follow is not None:
            self.follow.down.weight[:, :hidden] /= self.input_scale[:hidden]


def follow(outputs: torch.Tensor, embeddings: torch.Tensor, down: Layer, up: Layer) -> torch.Tensor:
    """Correct mask rows' outputs [..., h] for the tokens above, whose embeddings are [..., h]."""
    normed = F.rms_norm(outputs, outputs.shape[-1:])
    return outputs + up(F.silu(down(torch.cat([embeddings, normed], dim=-1))))


class TokenAbove(nn.Module):
    """Two layers that correct a mask row's output for the token above it."""

    def __init__(self, hidden: int, rank: int):
        super().__init__()
        self.down = nn.Linear(2 * hidden, rank, bias=False)
        self.up = nn.Linear(rank, hidden, bias=False)

    def forward(self, outputs: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        return follow(outputs, embeddings, self.down, self.up)
