"""The P-EAGLE draft head as a plain torch module, for training and offline evaluation.

An EAGLE-3 head (eagle3/head.py) of one or more layers. After its first prediction it reads no draft: each further
position has the embedding of a mask token and a learnt hidden state, so that one forward predicts all of them
(P-EAGLE, 2602.01469). Axis names as in eagle2/head.py.
"""

from __future__ import annotations

import torch
from torch import nn

from ..eagle2.head import DecoderLayer, HeadConfig, RmsNorm, rotary_table
from ..eagle3.head import Eagle3Head


class PEagleHead(Eagle3Head):
    """Fused features, decoder layers, an LM head and the mask, with the parameter names of the P-EAGLE checkpoints."""

    def __init__(
        self, config: HeadConfig, draft_vocab_size: int, num_layers: int, target_hidden_size: int | None = None
    ):
        super().__init__(config, draft_vocab_size, target_hidden_size)
        self.layers = nn.ModuleDict({str(number): FurtherLayer(config) for number in range(1, num_layers)})
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, self.fc.in_features))
        self.register_buffer("mask_embedding", torch.zeros(config.hidden_size), persistent=False)

    def aligned(self, embeddings: torch.Tensor, features: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """Inputs [B, T, h] of `lm_head` for `steps` positions: pass j, at row t, predicts from the features to t-j+1.

        embeddings [B, T, h] of tokens t+1, features [B, T, 3h]; passes after the first read the mask alone. Row t of
        pass j sees what it sees in a draft: the features' rows to t-j+1, then the mask rows of passes 2 to j (the mask
        of HASS, see eagle2/alignment.py).
        """
        shape = embeddings.shape
        cos, sin = rotary_table(self.config, torch.arange(shape[1], device=features.device))
        masks = self.mask_embedding.to(embeddings.dtype).expand(1, *shape[1:])
        fused, mask = self.fuse(features), self.fuse(self.mask_hidden.to(features.dtype))
        # The first layer reads the same in each sequence and in each pass after the first.
        projected = self.midlayer.project(masks, mask.expand(1, *shape[1:]), cos, sin)
        of_mask = [one.expand(shape[0], -1, -1, -1) for one in projected]
        keys: list[list[torch.Tensor]] = [[] for _ in range(1 + len(self.layers))]
        values: list[list[torch.Tensor]] = [[] for _ in keys]
        scored = []
        for step in range(steps):
            hidden = mask.expand(shape) if step else fused
            query, key, value = of_mask if step else self.midlayer.project(embeddings, fused, cos, sin)
            for number, layer in enumerate([self.midlayer, *self.layers.values()]):
                if number:
                    query, key, value = layer.project(hidden, cos, sin)
                keys[number].append(key)
                values[number].append(value)
                hidden = layer.finish(hidden, self.attend(query, keys[number], values[number]))
            scored.append(self.norm(hidden))
        return scored


class FurtherLayer(DecoderLayer):
    """A Llama decoder layer, with its input norm."""

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        self.input_layernorm = RmsNorm(config.hidden_size, eps=config.rms_norm_eps)

    def project(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
        """As `Attention.project`, for hidden [B, T, h]."""
        return self.self_attn.project(self.input_layernorm(hidden), cos, sin)
