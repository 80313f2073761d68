"""Tiny checkpoints with quantised weights, in the formats that vLLM's CPU engine serves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from vllm.model_executor.layers.quantization.utils.quant_utils import awq_pack, gptq_pack, pack_cols, quantize_weights
from vllm.scalar_type import scalar_types

GROUP = 32


def _w8a8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    return {f"{name}.weight": (weight / scales).round().to(torch.int8), f"{name}.weight_scale": scales}


def _w4a16(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    _, levels, scales, _ = quantize_weights(weight.T, scalar_types.uint4b8, GROUP)
    packed = pack_cols(levels.T.contiguous(), 4, *weight.shape)
    shape = torch.tensor(weight.shape)
    return {f"{name}.weight_packed": packed, f"{name}.weight_scale": scales.T, f"{name}.weight_shape": shape}


def _gptq(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    outputs, inputs = weight.shape
    _, levels, scales, _ = quantize_weights(weight.T, scalar_types.uint4b8, GROUP)
    zeros = pack_cols(torch.full_like(scales, 7, dtype=torch.int32), 4, *scales.shape)
    return {
        f"{name}.qweight": gptq_pack(levels, 4, inputs, outputs),
        f"{name}.qzeros": zeros,
        f"{name}.scales": scales.bfloat16(),
        f"{name}.g_idx": torch.arange(inputs, dtype=torch.int32) // GROUP,
    }


def _awq(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    outputs, inputs = weight.shape
    _, levels, scales, zeros = quantize_weights(weight.T, scalar_types.uint4, GROUP, zero_points=True)
    return {
        f"{name}.qweight": awq_pack(levels, 4, inputs, outputs),
        f"{name}.qzeros": awq_pack(zeros, 4, *zeros.shape),
        f"{name}.scales": scales.bfloat16(),
    }


def _compressed(form: str, weights: dict, inputs: dict | None) -> dict:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": []}


def _integers(bits: int, strategy: str, **more) -> dict:
    return {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False, "strategy": strategy, **more}


#: By name: how a layer's weights are written, and the checkpoint's ``quantization_config``.
FORMATS: dict[str, tuple[Callable[[str, torch.Tensor], dict[str, torch.Tensor]], dict]] = {
    "w8a8": (
        _w8a8,
        _compressed("int-quantized", _integers(8, "channel"), _integers(8, "token") | {"dynamic": True}),
    ),
    "w4a16": (_w4a16, _compressed("pack-quantized", _integers(4, "group", group_size=GROUP), None)),
    "gptq": (_gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}),
    "awq": (_awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
}


def write_quantised(path: Path, target: Path, form: str, lm_head: bool = False) -> Path:
    """Write the target's checkpoint with its linear layers, and perhaps its LM head, in one of ``FORMATS``."""
    write, quantization = FORMATS[form]
    quantization, config = json.loads(json.dumps(quantization)), json.loads((target / "config.json").read_text())
    if "config_groups" not in quantization:
        quantization["lm_head"] = lm_head
    elif lm_head:
        quantization["config_groups"]["group_0"]["targets"].append("re:.*lm_head$")
    else:
        quantization["ignore"].append("lm_head")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(target / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer.endswith("_proj") or (lm_head and layer == "lm_head"):
            tensors |= write(layer, tensor.float())
        else:
            tensors[name] = tensor
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, path / "model.safetensors", metadata={"format": "pt"})
    return path
