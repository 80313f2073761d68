"""Random LoRA adapters of the tiny target, in peft's format."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.doubles.tiny import HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, VOCAB

#: By module: its parent, inputs and outputs.
SHAPES = {
    "q_proj": ("self_attn", HIDDEN, HEADS * HEAD_DIM),
    "k_proj": ("self_attn", HIDDEN, KV_HEADS * HEAD_DIM),
    "v_proj": ("self_attn", HIDDEN, KV_HEADS * HEAD_DIM),
    "o_proj": ("self_attn", HEADS * HEAD_DIM, HIDDEN),
    "gate_proj": ("mlp", HIDDEN, INTERMEDIATE),
    "up_proj": ("mlp", HIDDEN, INTERMEDIATE),
    "down_proj": ("mlp", INTERMEDIATE, HIDDEN),
}


def write_adapter(
    path: Path,
    seed: int,
    modules: tuple[str, ...] = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"),
    rank: int = 4,
    num_layers: int = 2,
) -> Path:
    """An adapter that changes most answers; ``embed_tokens`` and ``lm_head`` are modules too."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    tensors = {}
    for name in modules:
        if name == "embed_tokens":
            prefix = "base_model.model.model.embed_tokens"
            tensors[f"{prefix}.lora_embedding_A"] = random(rank, VOCAB)
            tensors[f"{prefix}.lora_embedding_B"] = random(HIDDEN, rank)
            continue
        if name == "lm_head":
            layers, inputs, outputs = ["lm_head"], HIDDEN, VOCAB
        else:
            parent, inputs, outputs = SHAPES[name]
            layers = [f"model.layers.{layer}.{parent}.{name}" for layer in range(num_layers)]
        for layer in layers:
            tensors[f"base_model.model.{layer}.lora_A.weight"] = random(rank, inputs)
            tensors[f"base_model.model.{layer}.lora_B.weight"] = random(outputs, rank)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps({**config, "target_modules": list(modules)}))
    return path
