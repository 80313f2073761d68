"""Tiny targets with an MTP layer that is often right: it passes the embedding through, and its block adds little.

Each family has names of its own in the checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.doubles import architectures, images, tiny
from tests.doubles.architectures import (
    ARCHITECTURES,
    COMMON,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
    Architecture,
    write_target,
)

Tensors = dict[str, torch.Tensor]


def _projection(is_embedding_first: bool) -> torch.Tensor:
    parts = [torch.eye(HIDDEN), 0.05 * torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(3))]
    return torch.cat(parts if is_embedding_first else parts[::-1], dim=1)


#: What a part of a layer ends with.
_LAST_NORMS = ("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight", "post_feedforward_layernorm.weight")
_LAST = ("o_proj.weight", "down_proj.weight", *_LAST_NORMS)


def _block(tensors: Tensors, source: str, name: str) -> Tensors:
    """Copy the target's layer ``source`` to ``name``; what it adds is scaled down."""
    block = {key.replace(source, name): tensor.clone() for key, tensor in tensors.items() if key.startswith(source)}
    return {key: 0.1 * one if key.endswith(_LAST) else one for key, one in block.items()}


def _norms(*names: str) -> Tensors:
    return {f"{name}.weight": torch.ones(HIDDEN) for name in names}


def _mimo(tensors: Tensors) -> Tensors:
    layer = "model.mtp_layers.0"
    norms = _norms(*(f"{layer}.{name}" for name in ("token_layernorm", "hidden_layernorm", "final_layernorm")))
    return _block(tensors, "model.layers.1.", f"{layer}.") | norms | {f"{layer}.input_proj.weight": _projection(False)}


def _after_the_last(norm: str, source: str = "model") -> Callable[[Tensors], Tensors]:
    """Name the layer as one more of the target's; ``norm`` is its last norm."""
    layer = f"{source}.layers.{LAYERS}"

    def tensors_of(tensors: Tensors) -> Tensors:
        norms = _norms(*(f"{layer}.{name}" for name in ("enorm", "hnorm", norm)))
        block = _block(tensors, f"{source}.layers.1.", f"{layer}.")
        return block | norms | {f"{layer}.eh_proj.weight": _projection(True)}

    return tensors_of


_glm = _after_the_last("shared_head.norm")


def _ernie(tensors: Tensors) -> Tensors:
    norms = _norms("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0")
    block = _block(tensors, "model.layers.0.", "model.mtp_block.0.")
    return block | norms | {"model.mtp_linear_proj.0.weight": _projection(True)}


def _exaone(source: str) -> Callable[[Tensors], Tensors]:
    def tensors_of(tensors: Tensors) -> Tensors:
        norms = _norms("mtp.norm", "mtp.pre_fc_norm_hidden", "mtp.pre_fc_norm_embedding")
        return _block(tensors, f"{source}.layers.0.", "mtp.layers.0.") | norms | {"mtp.fc.weight": _projection(True)}

    return tensors_of


def _nemotron(tensors: Tensors) -> Tensors:
    layer = "mtp.layers.0"
    norms = _norms(*(f"{layer}.{name}" for name in ("enorm", "hnorm", "final_layernorm")))
    return _block(tensors, "backbone.layers.1.", f"{layer}.") | norms | {f"{layer}.eh_proj.weight": _projection(True)}


def _step(tensors: Tensors) -> Tensors:
    layer = f"model.layers.{LAYERS}"
    norms = {name: 0 * one for name, one in _norms(*(f"{layer}.{part}" for part in _STEP_NORMS)).items()}
    head = {f"{layer}.shared_head.output.weight": tensors["lm_head.weight"].clone()}
    projection = {f"{layer}.eh_proj.weight": _projection(True)}
    return _block(tensors, "model.layers.1.", f"{layer}.") | norms | projection | head


def _experts(num_experts: int, size: int) -> Tensors:
    """Make experts and a shared one, in the names of Step 3.5."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    sizes = {"gate_proj": (size, HIDDEN), "up_proj": (size, HIDDEN), "down_proj": (HIDDEN, size)}
    routed = {f"moe.{name}": random(num_experts, *shape) for name, shape in sizes.items()}
    shared = {f"share_expert.{name}": random(*shape) for name, shape in sizes.items()}
    return {"moe.gate": random(num_experts, HIDDEN)} | routed | shared


_STEP_NORMS = ("enorm", "hnorm", "shared_head.norm")


def _write_step(path: Path) -> None:
    """Write Step 3.5: norms from 0, a gate on each head, experts in the first layer, windows in every second one."""
    tensors = load_file(tiny.write_target(path) / "model.safetensors")
    tensors = {name: one for name, one in tensors.items() if "layers.0.mlp" not in name}
    tensors |= {f"model.layers.0.{name}.weight": one for name, one in _experts(4, 2 * HIDDEN).items()}
    tensors["model.layers.0.moe.router_bias"] = torch.zeros(4)
    tensors |= {name: torch.zeros_like(one) for name, one in tensors.items() if "norm" in name}
    for layer in range(LAYERS):
        attention = f"model.layers.{layer}.self_attn"
        tensors |= {f"{attention}.{name}_norm.weight": torch.zeros(tiny.HEAD_DIM) for name in "qk"}
        tensors[f"{attention}.g_proj.weight"] = torch.randn(
            tiny.HEADS, HIDDEN, generator=torch.Generator().manual_seed(4)
        )
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text()) | {
        "architectures": ["Step3p5ForCausalLM"],
        "model_type": "step3p5",
        "num_attention_groups": tiny.KV_HEADS,
        "moe_layers_enum": "0",
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 2 * HIDDEN,
        "share_expert_dim": 2 * HIDDEN,
        "use_head_wise_attn_gate": True,
        "sliding_window": 24,
    }
    (path / "config.json").write_text(json.dumps(config))


def _qwen(source: str) -> Callable[[Tensors], Tensors]:
    """Norms of these models add 1 to their weights."""

    def layer(tensors: Tensors) -> Tensors:
        norms = _norms("mtp.norm", "mtp.pre_fc_norm_hidden", "mtp.pre_fc_norm_embedding")
        block = _block(tensors, f"{source}.layers.1.", "mtp.layers.0.")
        return block | {name: 0 * one for name, one in norms.items()} | {"mtp.fc.weight": _projection(True)}

    return layer


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
_ONE_KIND = {"layer_types": ["full_attention"] * LAYERS, "mlp_layer_types": ["dense", "sparse"]}
EXAONE = Architecture(
    "ExaoneMoeConfig",
    "",
    {"head_dim": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **_ONE_KIND, **EXPERTS},
)
HY = Architecture(
    "HYV3Config",
    "",
    {
        "head_dim": 32,
        "first_k_dense_replace": 1,
        "expert_hidden_dim": INTERMEDIATE,
        "qk_norm": True,  # vLLM reads these three; transformers does not know them
        "route_norm": True,
        **EXPERTS,
    },
)
_OF_ATTENTION = {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention"]}
NEMOTRON = Architecture("NemotronHConfig", "", ARCHITECTURES["Nemotron-H"].settings | _OF_ATTENTION)
_VISION = images.VISION_35 | {"num_key_value_heads": 1, "out_hidden_size": HIDDEN}


def _write_images(name: str, module: str, text: dict, **entries: int) -> Callable[[Path], object]:
    """Write a model that reads images; its vision part is not served."""

    def write(path: Path) -> None:
        images.vllm_module(module, (f"{name}ForConditionalGeneration",))
        config = getattr(transformers, f"{name}Config")(
            text_config={**COMMON, "head_dim": 32, **text},
            vision_config=_VISION,
            image_token_id=images.IMAGE,
            video_token_id=images.VIDEO,
            tie_word_embeddings=False,
            **entries,
        )
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForConditionalGeneration")._from_config(config, dtype=torch.float32)
        architectures.scatter(model, Architecture("", ""), torch.Generator().manual_seed(0))
        for part, weight in model.named_parameters():
            if part.endswith(_LAST_NORMS):  # or the next token hardly depends on the last one
                weight.data *= 0.4
        model.eval().save_pretrained(path)

    return write


_OCR_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6], "partial_rotary_factor": 1.0}
_write_ocr = _write_images("GlmOcr", "glm_ocr", {"rope_parameters": _OCR_ROPE, "num_nextn_predict_layers": 1})
_write_exaone45 = _write_images(
    "Exaone4_5_",
    "exaone4_5",
    {"layer_types": ["full_attention"] * LAYERS, "sliding_window": None},
    vocab_size=tiny.VOCAB,
)
#: By family: how its target is written, and the tensors of its MTP layer.
FAMILIES: dict[str, tuple[Callable[[Path], object], Callable[[Tensors], Tensors]]] = {
    "MiMo": (lambda path: tiny.write_target(path, family="qwen2"), _mimo),
    "GLM-4 MoE": (lambda path: write_target(path, GLM), _glm),
    "ERNIE": (lambda path: write_target(path, ERNIE), _ernie),
    "EXAONE MoE": (lambda path: write_target(path, EXAONE), _exaone("model")),
    "EXAONE 4.5": (_write_exaone45, _exaone("model.language_model")),
    "Step 3.5": (_write_step, _step),
    "Qwen3-Next": (lambda path: write_target(path, ARCHITECTURES["Qwen3-Next"]), _qwen("model")),
    "Qwen3.5": (lambda path: images.write_qwen35(path, {}), _qwen("model.language_model")),
    "Qwen3.5 MoE": (
        lambda path: images.write_qwen35(path, ARCHITECTURES["Qwen3.5 MoE"].settings),
        _qwen("model.language_model"),
    ),
    "DeepSeek-V3": (lambda path: write_target(path, ARCHITECTURES["DeepSeek-V3"]), _glm),
    "GLM-4.7-Flash": (lambda path: write_target(path, ARCHITECTURES["GLM-4.7-Flash"]), _glm),
    "GLM-OCR": (_write_ocr, _after_the_last("shared_head.norm", "model.language_model")),
    "HY 3": (lambda path: write_target(path, HY), _after_the_last("final_layernorm")),
    "Nemotron-H": (lambda path: write_target(path, NEMOTRON), _nemotron),
}


def write_with_mtp(path: Path, family: str, count: int = 1) -> Path:
    """Write a target with an MTP layer, or with ``count`` equal ones whose numbers follow the target's layers."""
    write, layer = FAMILIES[family]
    write(path)
    config = json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": count}
    if "text_config" in config:
        config["text_config"]["mtp_num_hidden_layers"] = 1
    if family == "MiMo":
        config["architectures"] = ["MiMoForCausalLM"]
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    for number in range(LAYERS, LAYERS + count):
        own = layer(tensors).items()
        tensors |= {name.replace(f"layers.{LAYERS}.", f"layers.{number}."): one.contiguous() for name, one in own}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@torch.no_grad()
def write_gemma(path: Path) -> tuple[Path, Path]:
    """Write a Gemma 4 and its assistant, whose projection is fitted to greedy answers; its layers add little."""
    target, drafter = path / "target", path / "assistant"
    model = write_target(target, ARCHITECTURES["Gemma 4"])
    none = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": LAYERS}
    text = model.config.get_text_config().to_dict() | none
    generator = torch.Generator().manual_seed(1)
    ids = model.generate(
        torch.randint(3, 150, (64, 8), generator=generator), max_new_tokens=40, do_sample=False, eos_token_id=None
    )
    hidden, embedding = model.model(ids).last_hidden_state, model.get_input_embeddings().weight
    inputs = torch.cat([embedding[ids][:, 1:] * HIDDEN**0.5, hidden[:, :-1]], dim=-1).flatten(0, 1).double()
    fitted = torch.linalg.lstsq(inputs, hidden[:, 1:].flatten(0, 1).double(), driver="gelsd").solution.T.float()
    tensors = {
        "pre_projection.weight": fitted,
        "post_projection.weight": torch.eye(HIDDEN),
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        source, name = f"model.layers.{layer}.", f"model.layers.{layer}."
        own = {key: one for key, one in model.state_dict().items() if key.startswith(source)}
        kept = ("q_proj", "o_proj", "q_norm", "mlp.", "layernorm", "layer_scalar")
        own = {key: one for key, one in own.items() if any(part in key for part in kept)}
        scale = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
        tensors |= {key.replace(source, name): 0.02 * one if key.endswith(scale) else one for key, one in own.items()}
    config = {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": HIDDEN,
        "text_config": text,
        "tie_word_embeddings": True,
    }
    tensors = {key: one.detach().clone() for key, one in tensors.items()}
    tiny._write(drafter, json.loads(json.dumps(config, default=str)), tensors)
    return target, drafter
