"""A tiny DFlash head that knows some answers of its target by heart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from tests.doubles.tiny import HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, VOCAB, _write, llama_config

#: Of the target, whose outputs the head reads; and the token of positions that are predicted.
TARGET_LAYERS, MASK = (0, 1), VOCAB - 1
LAYERS = 2


class _Norm(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-5)


def _rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """``[..., num_rows, num_heads, HEAD_DIM]`` at ``positions`` (``[..., num_rows]``)."""
    frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = (positions[..., None].float() * frequencies).unsqueeze(-2)
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class _Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.q_norm, self.k_norm = _Norm(HEAD_DIM), _Norm(HEAD_DIM)

    def key_value(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key = self.k_norm(self.k_proj(x).unflatten(-1, (KV_HEADS, HEAD_DIM)))
        return _rotated(key, positions), self.v_proj(x).unflatten(-1, (KV_HEADS, HEAD_DIM))

    def forward(self, x, positions, context, visible):
        """Blocks ``[num_blocks, size, HIDDEN]`` beside a context ``[num_rows, HIDDEN]``, ``[num_blocks, num_rows]``."""
        num_blocks, size, _ = x.shape
        query = _rotated(self.q_norm(self.q_proj(x).unflatten(-1, (HEADS, HEAD_DIM))), positions)
        own = self.key_value(x, positions)
        given = self.key_value(context, torch.arange(len(context)))
        keys, values = (
            torch.cat([one.expand(num_blocks, *one.shape), block], dim=1).repeat_interleave(HEADS // KV_HEADS, dim=2)
            for one, block in zip(given, own, strict=True)
        )
        mask = torch.cat([visible, torch.ones(num_blocks, size, dtype=torch.bool)], dim=1)[:, None, None]
        heads = (one.transpose(1, 2) for one in (query, keys, values))
        return self.o_proj(F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).flatten(2))


class _Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, INTERMEDIATE, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp = _Attention(), _Mlp()
        self.input_layernorm, self.post_attention_layernorm = _Norm(HIDDEN), _Norm(HIDDEN)

    def forward(self, x, *attention):
        x = x + self.self_attn(self.input_layernorm(x), *attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class Head(nn.Module):
    """DFlash as vLLM computes it."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(len(TARGET_LAYERS) * HIDDEN, HIDDEN, bias=False)
        self.hidden_norm, self.norm = _Norm(HIDDEN), _Norm(HIDDEN)
        self.layers = nn.ModuleList(_Layer() for _ in range(LAYERS))

    def forward(self, embeddings, hidden, roots, size):
        """Predict blocks of ``size`` rows from the roots (int64 ``[num_blocks]``, places in the text)."""
        positions = roots[:, None] + torch.arange(size)
        context = self.hidden_norm(self.fc(hidden))
        visible = torch.arange(len(hidden)) < roots[:, None]
        x = embeddings
        for layer in self.layers:
            x = layer(x, positions, context, visible)
        return self.norm(x)[:, 1:]


def write_head(
    path: Path, target: Path, prompts: list[list[int]], answer_len: int, positions: int = 4, steps: int = 100
) -> Path:
    """Train a head on the target's greedy answers to some prompts."""
    from transformers import LlamaForCausalLM

    model, weights = LlamaForCausalLM.from_pretrained(target).eval(), load_file(target / "model.safetensors")
    embedding, lm_head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    torch.manual_seed(0)
    head, texts = Head(), []
    for prompt in prompts:
        with torch.no_grad():
            given = torch.tensor([prompt])
            text = model.generate(given, max_new_tokens=answer_len, min_new_tokens=answer_len, do_sample=False)
            hidden = model(text, output_hidden_states=True).hidden_states
        roots = torch.arange(len(prompt), text.shape[1] - positions)
        tokens = text[0, roots[:, None] + torch.arange(positions + 1)]
        inputs = tokens.clone()
        inputs[:, 1:] = MASK
        texts.append(
            (embedding[inputs], torch.cat([hidden[i + 1][0] for i in TARGET_LAYERS], -1), roots, tokens[:, 1:])
        )
    optimiser = torch.optim.Adam(head.parameters(), lr=4e-3)
    for _ in range(steps):
        losses = []
        for embeddings, hidden, roots, tokens in texts:
            logits = head(embeddings, hidden, roots, positions + 1) @ lm_head.T
            losses.append(F.cross_entropy(logits.flatten(0, 1), tokens.flatten()))
        optimiser.zero_grad()
        torch.stack(losses).mean().backward()
        optimiser.step()
    return write(path, head, positions)


def write(path: Path, head: Head | None = None, positions: int = 4, **changes: Any) -> Path:
    """Write a head, untrained if none is given, with ``changes`` of its config."""
    state = {name: one.detach() for name, one in (head or Head()).state_dict().items()}
    return _write(path, config(positions) | changes, state)


def config(positions: int) -> dict:
    """Return a DFlash config as z-lab publishes it."""
    base = json.loads(json.dumps(llama_config(num_hidden_layers=LAYERS, model_type="qwen3")))
    return base | {
        "architectures": ["DFlashDraftModel"],
        "block_size": positions + 1,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(TARGET_LAYERS)},
    }
