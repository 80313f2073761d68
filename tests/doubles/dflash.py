"""Tiny heads that predict all positions in one forward, and know some answers of their target by heart."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.doubles.tiny import HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, VOCAB, _write, llama_config

#: Of the target, whose outputs the head reads; and the token of positions that are predicted.
TARGET_LAYERS, MASK = (0, 1), VOCAB - 1
LAYERS = 2
#: Of DFlash 2: earlier rows of its convolution, channels of a group, and candidates of a position.
TAPS, GROUP, CANDIDATES = 2, 16, 8
#: Of the pairwise terms.
RANK = 16


@dataclass(frozen=True)
class Form:
    """A published form of such a head.

    Attributes:
        window: tokens that a row sees; 0: all.
        causal: whether a row sees only the rows of its block before it.
        last_state: whether it reads the target's last hidden state, and not those of layers.
        convolves: DFlash 2.
        has_bias: DSpark.
        at_root: whether the root's row predicts the first position.
        speculators: whether the config is in the speculators format.
        first_id: the first target id of a draft vocabulary; 0: the target's own.
    """

    window: int = 0
    causal: bool = False
    last_state: bool = False
    convolves: bool = False
    has_bias: bool = False
    at_root: bool = False
    speculators: bool = False
    first_id: int = 0


PLAIN = Form()
FORMS = {
    "windows": Form(window=24, causal=True),
    "windows of blocks": Form(window=24),
    "last state": Form(last_state=True),
    "DFlash 2": Form(convolves=True),
    "DSpark": Form(has_bias=True, at_root=True),
    "DSpark, speculators": Form(has_bias=True, speculators=True),
    "DFlash, speculators": Form(speculators=True, first_id=10),
    "DFlash 2, speculators": Form(convolves=True, speculators=True),
}


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

    def forward(self, x, positions, context, visible, own_visible):
        """Blocks ``[num_blocks, size, HIDDEN]`` beside a context ``[num_rows, HIDDEN]``.

        What rows see of it, ``[num_blocks, size, num_rows]``, and of their block, ``[size, size]``.
        """
        num_blocks, size, _ = x.shape
        query = _rotated(self.q_norm(self.q_proj(x).unflatten(-1, (HEADS, HEAD_DIM))), positions)
        own = self.key_value(x, positions)
        given = self.key_value(context, torch.arange(len(context)))
        keys, values = (
            torch.cat([one.expand(num_blocks, *one.shape), block], dim=1).repeat_interleave(HEADS // KV_HEADS, dim=2)
            for one, block in zip(given, own, strict=True)
        )
        mask = torch.cat([visible, own_visible.expand(num_blocks, -1, -1)], dim=2)[:, None]
        heads = (one.transpose(1, 2) for one in (query, keys, values))
        return self.o_proj(F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).flatten(2))


class _Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, INTERMEDIATE, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Convolution(nn.Module):
    """DFlash 2: what goes into a part of a layer and what comes out, mixed with the rows before."""

    def __init__(self):
        super().__init__()
        self.base_kernel = nn.Parameter(0.1 * torch.randn(2, TAPS, HIDDEN))
        self.base_kernel.data[:, 0] += 1
        self.kernel_projection = nn.Linear(HIDDEN, 2 * TAPS * HIDDEN // GROUP, bias=False)
        self.kernel_projection.weight.data *= 0.1

    def mixed(self, x, delta, side):
        kernel = self.base_kernel[side] + delta.repeat_interleave(GROUP, dim=-1)
        return sum(kernel[..., tap, :] * F.pad(x, (0, 0, tap, 0))[:, : x.shape[1]] for tap in range(TAPS))

    def forward(self, x, part):
        deltas = self.kernel_projection(x).unflatten(-1, (2, TAPS, HIDDEN // GROUP)).unbind(-3)
        return self.mixed(part(self.mixed(x, deltas[0], 0)), deltas[1], 1)


class _Layer(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.self_attn, self.mlp = _Attention(), _Mlp()
        self.input_layernorm, self.post_attention_layernorm = _Norm(HIDDEN), _Norm(HIDDEN)
        if form.convolves:
            self.attention_conv, self.mlp_conv = _Convolution(), _Convolution()

    def forward(self, x, *attention):
        parts = (lambda given: self.self_attn(given, *attention)), self.mlp
        if hasattr(self, "mlp_conv"):
            mixed = zip((self.attention_conv, self.mlp_conv), parts, strict=True)
            parts = [(lambda given, conv=conv, part=part: conv(given, part)) for conv, part in mixed]
        x = x + parts[0](self.input_layernorm(x))
        return x + parts[1](self.post_attention_layernorm(x))


class _Selector(nn.Module):
    """DFlash 2: a term by the token before, and by what the head predicts."""

    def __init__(self):
        super().__init__()
        self.predecessor_codebook = nn.Parameter(0.3 * torch.randn(VOCAB, RANK))
        self.successor_codebook = nn.Parameter(0.3 * torch.randn(VOCAB, RANK))
        self.hidden_projection = nn.Linear(HIDDEN, RANK, bias=False)

    def forward(self, hidden, before):
        return (self.predecessor_codebook[before] * self.hidden_projection(hidden)) @ self.successor_codebook.T


class _Bias(nn.Module):
    """DSpark: a term by the token before."""

    def __init__(self):
        super().__init__()
        self.markov_w1 = nn.Embedding(VOCAB, RANK)
        self.markov_w1.weight.data *= 0.3
        self.markov_w2 = nn.Linear(RANK, VOCAB, bias=False)

    def forward(self, _hidden, before):
        return self.markov_w2(self.markov_w1(before))


class Head(nn.Module):
    """DFlash as vLLM computes it, and heads that are derived from it."""

    def __init__(self, form=PLAIN):
        super().__init__()
        self.form = form
        if not form.last_state:
            self.fc = nn.Linear(len(TARGET_LAYERS) * HIDDEN, HIDDEN, bias=False)
        self.hidden_norm, self.norm = _Norm(HIDDEN), _Norm(HIDDEN)
        self.layers = nn.ModuleList(_Layer(form) for _ in range(LAYERS))
        if form.convolves:
            self.candidate_selector = _Selector()
        if form.has_bias:
            self.markov_head = _Bias()

    def forward(self, embeddings, hidden, roots, size):
        """Predict blocks of ``size`` rows from the roots (int64 ``[num_blocks]``, places in the text)."""
        rows = torch.arange(size)
        positions = roots[:, None] + rows
        context = self.hidden_norm(hidden if self.form.last_state else self.fc(hidden))
        places = torch.arange(len(hidden))
        visible = (places < roots[:, None])[:, None].expand(-1, size, -1)
        if self.form.window:
            visible = visible & (positions[:, :, None] - places < self.form.window)
        own_visible = torch.ones(size, size, dtype=torch.bool)
        x = embeddings
        for layer in self.layers:
            x = layer(x, positions, context, visible, own_visible.tril() if self.form.causal else own_visible)
        return self.norm(x)[:, 0 if self.form.at_root else 1 :]

    def logits(self, hidden, lm_head, before):
        """``[num_blocks, num_positions, VOCAB]``, after the tokens ``before``."""
        term = getattr(self, "candidate_selector", None) or getattr(self, "markov_head", None)
        return hidden @ lm_head.T + (term(hidden, before) if term is not None else 0)


def write_head(
    path: Path,
    target: Path,
    prompts: list[list[int]],
    answer_len: int,
    positions: int = 4,
    steps: int = 100,
    form: Form = PLAIN,
) -> Path:
    """Train a head on the target's greedy answers to some prompts."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target).eval()
    embedding, lm_head = (one.weight.detach() for one in (model.get_input_embeddings(), model.get_output_embeddings()))
    torch.manual_seed(0)
    head, texts, size = Head(form), [], positions + (not form.at_root)
    for prompt in prompts:
        with torch.no_grad():
            given = torch.tensor([prompt])
            text = model.generate(given, max_new_tokens=answer_len, min_new_tokens=answer_len, do_sample=False)
            hidden = model(text, output_hidden_states=True).hidden_states
        roots = torch.arange(len(prompt), text.shape[1] - positions)
        tokens = text[0, roots[:, None] + torch.arange(positions + 1)]
        inputs = tokens[:, :size].clone()
        inputs[:, 1:] = MASK
        read = hidden[-1][0] if form.last_state else torch.cat([hidden[i + 1][0] for i in TARGET_LAYERS], -1)
        texts.append((embedding[inputs], read, roots, tokens))
    optimiser = torch.optim.Adam(head.parameters(), lr=4e-3)
    for _ in range(steps):
        losses = []
        for embeddings, hidden, roots, tokens in texts:
            logits = head.logits(head(embeddings, hidden, roots, size), lm_head, tokens[:, :-1])
            losses.append(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
        optimiser.zero_grad()
        torch.stack(losses).mean().backward()
        optimiser.step()
    return write(path, head, positions, lm_head)


def write(
    path: Path,
    head: Head | None = None,
    positions: int = 4,
    lm_head: torch.Tensor | None = None,
    form: Form = PLAIN,
    **changes: Any,
) -> Path:
    """Write a head, untrained if none is given, with ``changes`` of its config; ``lm_head``: the target's."""
    head = head or Head(form)
    state = {name: one.detach() for name, one in head.state_dict().items()}
    if first := head.form.first_id:
        rows = torch.randn(VOCAB, HIDDEN) if lm_head is None else lm_head
        state |= {"lm_head.weight": rows[first:].clone(), "d2t": torch.full((VOCAB - first,), first)}
        state["t2d"] = torch.arange(VOCAB) >= first
    return _write(path, config(positions, head.form) | changes, state)


def config(positions: int, form: Form = PLAIN) -> dict:
    """Return a config as it is published: by z-lab (DFlash), DeepSeek (DSpark) or in the speculators format."""
    base = json.loads(json.dumps(llama_config(num_hidden_layers=LAYERS, model_type="qwen3")))
    sizes = {"block_size": positions + (not form.at_root), "mask_token_id": MASK}
    if form.window:
        base |= {"use_sliding_window": True, "sliding_window": form.window, "max_window_layers": 0}
        base |= {"layer_types": ["sliding_attention" if form.causal else "full_attention"] * LAYERS}
    bias = {"markov_rank": RANK, "markov_head_type": "vanilla"}
    convolutions = {"conv_kernel_size": TAPS, "conv_group_size": GROUP}
    convolutions |= {"selector_rank": RANK, "selector_top_k": CANDIDATES}
    if form.speculators:
        ids = [one + 1 for one in TARGET_LAYERS]
        kind = "dspark" if form.has_bias else "dflash2" if form.convolves else "dflash"
        return {
            "architectures": [{"dspark": "DSpark", "dflash2": "DFlash2", "dflash": "DFlash"}[kind] + "DraftModel"],
            "speculators_model_type": kind,
            "speculators_config": {
                "algorithm": kind,
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": positions}],
                "verifier": {"name_or_path": "org/Target", "architectures": ["LlamaForCausalLM"]},
            },
            "transformer_layer_config": base,
            "aux_hidden_state_layer_ids": ids,
            "draft_vocab_size": VOCAB - form.first_id,
            **sizes,
            **(bias if form.has_bias else convolutions if form.convolves else {}),
        }
    if form.has_bias:
        named = {"architectures": ["Qwen3DSparkModel"], "target_layer_ids": list(TARGET_LAYERS)}
        return base | named | sizes | bias | {"enable_confidence_head": False}
    given: dict[str, Any] = {"mask_token_id": MASK, "target_layer_ids": list(TARGET_LAYERS)}
    if form.last_state:
        given = {"mask_token_id": MASK, "use_aux_hidden_state": False}
    if form.window and not form.causal:
        given |= {"use_swa": True, "swa_window_size": form.window}
    if form.convolves:
        given |= convolutions
    name = "DFlash2DraftModel" if form.convolves else "DFlashDraftModel"
    return base | {"architectures": [name], "block_size": sizes["block_size"], "dflash_config": given}
