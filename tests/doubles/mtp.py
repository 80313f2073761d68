"""Tiny targets with an MTP layer that is often right: it passes the embedding through, and its block adds little.

Each family has names of its own in the checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.doubles import tiny
from tests.doubles.architectures import ARCHITECTURES, EXPERTS, HIDDEN, LAYERS, Architecture, write_target

Tensors = dict[str, torch.Tensor]


def _projection(is_embedding_first: bool) -> torch.Tensor:
    parts = [torch.eye(HIDDEN), 0.05 * torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(3))]
    return torch.cat(parts if is_embedding_first else parts[::-1], dim=1)


def _block(tensors: Tensors, source: str, name: str) -> Tensors:
    """Copy the target's layer ``source`` to ``name``; what it adds is scaled down."""
    block = {key.replace(source, name): tensor.clone() for key, tensor in tensors.items() if key.startswith(source)}
    return {
        key: 0.1 * one if key.endswith(("o_proj.weight", "down_proj.weight")) else one for key, one in block.items()
    }


def _norms(*names: str) -> Tensors:
    return {f"{name}.weight": torch.ones(HIDDEN) for name in names}


def _mimo(tensors: Tensors) -> Tensors:
    layer = "model.mtp_layers.0"
    norms = _norms(*(f"{layer}.{name}" for name in ("token_layernorm", "hidden_layernorm", "final_layernorm")))
    return _block(tensors, "model.layers.1.", f"{layer}.") | norms | {f"{layer}.input_proj.weight": _projection(False)}


def _glm(tensors: Tensors) -> Tensors:
    layer = f"model.layers.{LAYERS}"
    norms = _norms(*(f"{layer}.{name}" for name in ("enorm", "hnorm", "shared_head.norm")))
    return _block(tensors, "model.layers.1.", f"{layer}.") | norms | {f"{layer}.eh_proj.weight": _projection(True)}


def _ernie(tensors: Tensors) -> Tensors:
    norms = _norms("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0")
    block = _block(tensors, "model.layers.0.", "model.mtp_block.0.")
    return block | norms | {"model.mtp_linear_proj.0.weight": _projection(True)}


GLM = Architecture(
    "Glm4MoeConfig",
    "",
    {
        "head_dim": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        **EXPERTS,
    },
)
ERNIE = Architecture(
    "Ernie4_5_MoeConfig",
    "",
    {
        "tie_word_embeddings": False,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        **EXPERTS,
    },
)
#: By family: how its target is written, and the tensors of its MTP layer.
FAMILIES: dict[str, tuple[Callable[[Path], object], Callable[[Tensors], Tensors]]] = {
    "MiMo": (lambda path: tiny.write_target(path, family="qwen2"), _mimo),
    "GLM-4 MoE": (lambda path: write_target(path, GLM), _glm),
    "ERNIE": (lambda path: write_target(path, ERNIE), _ernie),
    "DeepSeek-V3": (lambda path: write_target(path, ARCHITECTURES["DeepSeek-V3"]), _glm),
}


def write_with_mtp(path: Path, family: str) -> Path:
    """Write a target with one MTP layer."""
    write, layer = FAMILIES[family]
    write(path)
    config = json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    if family == "MiMo":
        config["architectures"] = ["MiMoForCausalLM"]
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    tensors |= {name: tensor.contiguous() for name, tensor in layer(tensors).items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path
