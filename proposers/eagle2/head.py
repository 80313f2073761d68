"""The EAGLE draft head as a plain torch module, for training and offline evaluation.

    x_t     = fc([embed(token_{t+1}); feature_t])
    out_t   = DecoderLayer(x)_t                        (no input norm, no final norm)

`out_t` predicts feature_{t+1}, which the target's LM head reads. Row t has rotary position t, the position of
`feature_t`. Axis names: B sequences, T rows, H query heads, G key/value heads, D head size, h hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from . import rotary
from .alignment import AlignedAttention, aligned_attention


@dataclass(frozen=True)
class HeadConfig:
    """Geometry of a head, which equals that of one decoder layer of its target."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope: rotary.Rope = (("rope_type", "default"), ("rope_theta", 10000.0))
    rms_norm_eps: float = 1e-6
    bias: bool = False

    @classmethod
    def from_dict(cls, config: dict, bias: bool | None = None) -> HeadConfig:
        """Read a Hugging Face Llama config of a target or of a head; `bias` overrides the config's."""
        heads = config["num_attention_heads"]
        return cls(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            rope=rotary.numbers_of(config),
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            bias=bool(config.get("bias", False)) if bias is None else bias,
        )


class ScaledHead(nn.Module):
    """A head whose first layer is fc. Training scales fc's inputs by `input_scale` to precondition them."""

    def __init__(self, config: HeadConfig, num_inputs: int):
        super().__init__()
        self.config = config
        self.fc = nn.Linear(num_inputs, config.hidden_size, bias=config.bias)
        self.register_buffer("input_scale", torch.ones(num_inputs), persistent=False)
        self.attend: AlignedAttention = aligned_attention

    def fuse(self, inputs: torch.Tensor) -> torch.Tensor:
        """Combine what the head reads: [..., num_inputs] -> [..., h]."""
        return self.fc(inputs * self.input_scale.to(inputs.dtype))

    def folded_state(self) -> dict[str, torch.Tensor]:
        """The state dict of an equal head whose input_scale is 1, as checkpoints store it."""
        return self.state_dict() | {"fc.weight": self.fc.weight.detach() * self.input_scale}

    @torch.no_grad()
    def unfold(self) -> None:
        """Adapt weights of a checkpoint, which were loaded as they are, to this head's input_scale."""
        self.fc.weight /= self.input_scale


class EagleHead(ScaledHead):
    """fc and one Llama decoder layer, with the parameter names of the EAGLE checkpoints."""

    def __init__(self, config: HeadConfig):
        super().__init__(config, 2 * config.hidden_size)
        self.layers = nn.ModuleList([DecoderLayer(config)])

    def forward(self, embeddings: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """embeddings and features [B, T, h] (row t: token t+1, feature t) -> predicted features [B, T, h]."""
        return self.aligned(embeddings, features, steps=1)[0]

    def combine(self, embeddings: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """The layer's input: fc([embedding; feature])."""
        return self.fuse(torch.cat([embeddings, features], dim=-1))

    def aligned(self, embeddings: torch.Tensor, features: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """Outputs of `steps` passes of context alignment (HASS, section 3.2), the first on the target's features.

        Pass j reads, at row t, the output of pass j-1 for position t, detached; row 0 has no such output and keeps the
        target's feature. The query of row t sees rows up to t-j+1 of the target and, on the last j-1 diagonals, the
        inputs of passes 2..j.
        """
        layer = self.layers[0]
        cos, sin = rotary_table(self.config, torch.arange(features.shape[1], device=features.device))
        outputs: list[torch.Tensor] = []
        keys, values = [], []
        for step in range(steps):
            inputs = features if step == 0 else torch.cat([features[:, :1], outputs[-1].detach()[:, :-1]], dim=1)
            x = self.combine(embeddings, inputs)
            query, key, value = layer.self_attn.project(x, cos, sin)
            keys.append(key)
            values.append(value)
            outputs.append(layer.finish(x, self.attend(query, keys, values)))
        return outputs


class DecoderLayer(nn.Module):
    """A Llama decoder layer without input_layernorm; `input_size` of its attention is by default the hidden size."""

    def __init__(self, config: HeadConfig, input_size: int | None = None):
        super().__init__()
        self.self_attn = Attention(config, input_size)
        self.mlp = Mlp(config)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, eps=config.rms_norm_eps)

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Residual and MLP after attention: x [B, T, h], attended [B, H, T, D] -> [B, T, h]."""
        x = x + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; callers attend themselves, with keys and values of `project`."""

    def __init__(self, config: HeadConfig, input_size: int | None = None):
        super().__init__()
        self.config = config
        input_size = input_size or config.hidden_size
        query_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, query_size, bias=False)
        self.k_proj = nn.Linear(input_size, kv_size, bias=False)
        self.v_proj = nn.Linear(input_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)

    def project(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
        """x [B, T, input_size] -> query [B, H, T, D], key and value [B, G, T, D], query and key rotated."""
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(query, cos, sin), rotate(key, cos, sin), value


class RmsNorm(nn.RMSNorm):
    """RMSNorm in its input's dtype, so that the fused kernel also runs under autocast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Mlp(nn.Module):
    def __init__(self, config: HeadConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotary_table(config: HeadConfig, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [T, D] on the positions' device, of integer positions [T]."""
    return rotary.table(config.head_dim, config.rope, positions)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions in Llama's half-split layout: x [..., T, D]."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
