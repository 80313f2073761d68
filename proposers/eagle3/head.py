"""The EAGLE-3 draft head as a plain torch module, for training and offline evaluation.

    g_t   = fc([low_t; middle_t; high_t])           inputs of three layers of the target, fused
    out_t = DecoderLayer([norm(embed(token_{t+1})); norm(g_t)])_t + g_t
    lm_head(norm(out_t)) over the draft vocabulary predicts token t+2

After a drafted token, g is the drafter's output there, before the final norm. Row t has rotary position t. Axis names
as in eagle2/head.py.
"""

from __future__ import annotations

import torch
from torch import nn

from ..eagle2.head import DecoderLayer, HeadConfig, RmsNorm, ScaledHead, rotary_table

NUM_LAYERS = 3


def layer_ids(target_config: dict) -> tuple[int, int, int]:
    """The layers whose inputs are fused: vLLM's default 2, n // 2, n - 3; 0, n // 2, n of fewer than 6 layers."""
    layers = target_config["num_hidden_layers"]
    return (2, layers // 2, layers - 3) if layers >= 6 else (0, layers // 2, layers)


class Eagle3Head(ScaledHead):
    """Fused features, one decoder layer and an LM head, with the parameter names of the EAGLE-3 checkpoints."""

    def __init__(self, config: HeadConfig, draft_vocab_size: int, target_hidden_size: int | None = None):
        super().__init__(config, NUM_LAYERS * (target_hidden_size or config.hidden_size))
        self.midlayer = Eagle3Layer(config)
        self.norm = RmsNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab_size, bias=False)

    def aligned(self, embeddings: torch.Tensor, features: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """Training-time test: inputs [B, T, h] of `lm_head` in `steps` passes, the first on the target's features.

        embeddings [B, T, h] of tokens t+1, features [B, T, 3h]. Pass j reads, at row t, the output of pass j-1 for
        position t, with its gradient; the outputs of rows below j-1 have no such past and are not used. The mask is
        HASS's (see eagle2/alignment.py).
        """
        fused = self.fuse(features)
        cos, sin = rotary_table(self.config, torch.arange(features.shape[1], device=features.device))
        scored, keys, values = [], [], []
        hidden = fused
        for _ in range(steps):
            query, key, value = self.midlayer.project(embeddings, hidden, cos, sin)
            keys.append(key)
            values.append(value)
            output = self.midlayer.finish(hidden, self.attend(query, keys, values))
            scored.append(self.norm(output))
            hidden = torch.cat([fused[:, :1], output[:, :-1]], dim=1)
        return scored


class Eagle3Layer(DecoderLayer):
    """A Llama decoder layer whose attention reads [embedding; feature], and whose residual is the feature."""

    def __init__(self, config: HeadConfig):
        super().__init__(config, 2 * config.hidden_size)
        for name in ("hidden_norm", "input_layernorm"):
            setattr(self, name, RmsNorm(config.hidden_size, eps=config.rms_norm_eps))

    def project(self, embeddings: torch.Tensor, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
        """As `Attention.project`, for embeddings and hidden [B, T, h]."""
        x = torch.cat([self.input_layernorm(embeddings), self.hidden_norm(hidden)], dim=-1)
        return self.self_attn.project(x, cos, sin)
