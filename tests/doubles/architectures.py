"""Tiny random checkpoints of many architectures, each with an EAGLE head that is fitted to it.

A model is a transformers config class and a few settings; nothing here or in the product knows more of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

VOCAB, HIDDEN, INTERMEDIATE, LAYERS, HEADS = 160, 64, 96, 2, 2

#: Of each class, those fields that it has.
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": INTERMEDIATE}
WINDOW = {"sliding_window": 24}
ALTERNATING = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}


@dataclass(frozen=True)
class Architecture:
    """A tiny model.

    Attributes:
        config: name of its config class in transformers.
        special: what is special about it, for the table.
        settings: its config's fields besides ``COMMON``.
        gain: scale of its linear layers.  Where embedding and LM head are tied, the layers must be strong, or the
            model repeats its last token.
        embedding: scale of the embedding; small where the model multiplies it by the root of its hidden size.
        num_blocks: KV blocks of 32 tokens, few enough that requests are preempted.
        weights: one of ``FORMATS`` in doubles/quantised.py, or "" for plain ones.
        plain: more options of plain vLLM's engine.
        options: of the engine.  With ``enable_lora``, half of the requests use an adapter.
    """

    config: str
    special: str
    settings: dict[str, Any] = field(default_factory=dict)
    gain: float = 0.7
    embedding: float = 1.0
    num_blocks: int = 12
    weights: str = ""
    plain: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
#: Plain vLLM 0.32 fails on a CPU where it caches prefixes of states: Mamba-2 with prompts of more than a block, and
#: other layers with seeds of sampled requests, whose prompts it then reads in chunks.
NO_PREFIXES = {"enable_prefix_caching": False}
#: A layer of Mamba-2; of each class, those fields that it has.  Attention is wide, so that a block holds few tokens.
MAMBA2 = {
    "num_key_value_heads": HEADS,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "head_dim": 64,
}
#: Heads that vLLM's operator does not take.  Attention is wide, so that a block holds few tokens.
GATED_DELTA = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 48,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "head_dim": 256,
    "layer_types": ["linear_attention", "full_attention"],
}
#: The sizes that vLLM's CPU kernels take; with AMX it packs heads in steps of 32.
LATENTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": HEADS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    **EXPERTS,
}
#: With AMX, vLLM's own choice takes bfloat16 only.
PLAIN_LATENTS = {"plain": {"attention_config": {"backend": "CPU_MLA"}}}
#: vLLM's operator for rotary positions is wrong for MLA and LFM2; it is used in eager mode, but for YaRN.
TORCH_POSITIONS = {"options": {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}}
DEEPSEEK_YARN = {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}
TIED = {"gain": 2.0}
TIED_SCALED = {"gain": 1.5, "embedding": 0.02}

ARCHITECTURES = {
    "Phi": Architecture(
        "PhiConfig",
        "parallel blocks, biases, partial rotary positions",
        {"intermediate_size": 4 * HIDDEN, "num_key_value_heads": HEADS},  # vLLM before 0.32 takes no others
    ),
    "GPT-2": Architecture("GPT2Config", "learned positions", {"n_inner": INTERMEDIATE}, **TIED),
    "GPT-NeoX": Architecture("GPTNeoXConfig", "fused query, key and value"),
    "OPT": Architecture("OPTConfig", "learned positions", {"ffn_dim": 96, "word_embed_proj_dim": HIDDEN}, **TIED),
    "Falcon": Architecture("FalconConfig", "one key/value head", {"num_kv_heads": 1}, **TIED),
    "StableLM": Architecture("StableLmConfig", "partial rotary positions"),
    "Gemma": Architecture("GemmaConfig", "scaled, tied embedding", {"head_dim": 32}, **TIED_SCALED),
    "OLMo 2": Architecture("Olmo2Config", "norms after each block, and of queries and keys"),
    "Granite": Architecture("GraniteConfig", "multipliers", {"attention_multiplier": 0.2, "logits_scaling": 2.0}),
    "GLM-4": Architecture("Glm4Config", "interleaved rotary positions", {"head_dim": 32}),
    "SmolLM3": Architecture("SmolLM3Config", "a layer without positions", {"no_rope_layers": [1, 0]}, **TIED),
    "Cohere": Architecture("CohereConfig", "tied LM head, scaled logits", {"logit_scale": 0.25}, **TIED),
    "BLOOM": Architecture("BloomConfig", "ALiBi, norm of the embedding", **TIED),
    "Phi-3": Architecture("Phi3Config", "sliding window", WINDOW, num_blocks=11),
    "Starcoder2": Architecture("Starcoder2Config", "sliding window, biases", WINDOW, num_blocks=10, **TIED),
    "Gemma 2": Architecture(
        "Gemma2Config",
        "alternating windows, soft caps",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 5.0, **ALTERNATING},
        **TIED_SCALED,
    ),
    "Gemma 3": Architecture(
        "Gemma3TextConfig",
        "alternating windows, two rotary bases",
        {"head_dim": 32, "query_pre_attn_scalar": 32, **ALTERNATING},
        **TIED_SCALED,
    ),
    "Cohere2": Architecture(
        "Cohere2Config",
        "alternating windows, full layers without positions",
        {"head_dim": 32, "logit_scale": 0.25, **ALTERNATING},
        **TIED,
    ),
    "Gemma 3n": Architecture(
        "Gemma3nTextConfig",
        "layers that share a KV cache, alternating windows",
        {
            "head_dim": 32,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 4,
            **WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        **TIED_SCALED,
    ),
    "Gemma 4": Architecture(
        "Gemma4TextConfig",
        "head sizes that differ by layer, alternating windows",
        {
            "head_dim": 32,
            "global_head_dim": 64,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB,
            **ALTERNATING,
        },
        **TIED_SCALED,
    ),
    "OLMo 3": Architecture("Olmo3Config", "alternating windows", ALTERNATING),
    "Qwen2-VL": Architecture(
        "Qwen2VLConfig",
        "M-RoPE, multi-modal (images: tests/hosts/test_images.py)",
        options={"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 0, "video": 0}},
    ),
    "Qwen3-MoE": Architecture("Qwen3MoeConfig", "MoE", {"head_dim": 32, **EXPERTS}),
    "Mixtral": Architecture("MixtralConfig", "MoE", EXPERTS),
    "OLMoE": Architecture("OlmoeConfig", "MoE", EXPERTS),
    "Granite MoE": Architecture("GraniteMoeConfig", "MoE, multipliers", {"attention_multiplier": 0.2, **EXPERTS}),
    "gpt-oss": Architecture(
        "GptOssConfig",
        "MoE, attention sinks, alternating windows",
        {
            "head_dim": 32,
            "rope_parameters": YARN,
            **EXPERTS,
            **ALTERNATING,
        },
    ),
    "Qwen3-Next": Architecture(
        "Qwen3NextConfig",
        "gated delta rule (plain vLLM: a reference), MoE",
        {**GATED_DELTA, **EXPERTS, "shared_expert_intermediate_size": INTERMEDIATE},
        num_blocks=8,
        plain=NO_PREFIXES,
    ),
    "Qwen3.5": Architecture(
        "Qwen3_5Config",
        "gated delta rule (plain vLLM: a reference), M-RoPE",
        {"layer_types": GATED_DELTA["layer_types"]},
        num_blocks=8,
        options={"language_model_only": True},
        plain=NO_PREFIXES,
    ),
    "Qwen3.5 MoE": Architecture(
        "Qwen3_5MoeConfig",
        "gated delta rule (plain vLLM: a reference), M-RoPE, MoE",
        {"layer_types": GATED_DELTA["layer_types"], **EXPERTS, "shared_expert_intermediate_size": INTERMEDIATE},
        num_blocks=8,
        options={"language_model_only": True},
        plain=NO_PREFIXES,
    ),
    "Falcon-H1": Architecture(
        "FalconH1Config",
        "Mamba-2 beside attention",
        {**MAMBA2, "mamba_d_ssm": 128},
        num_blocks=18,
        plain=NO_PREFIXES,
    ),
    "Nemotron-H": Architecture(
        "NemotronHConfig",
        "Mamba-2 layers between attention",
        {
            "layers_block_type": ["mamba", "attention"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 1,
            "head_dim": 64,
            "num_key_value_heads": HEADS,
        },
        num_blocks=10,
        plain=NO_PREFIXES,
    ),
    "Granite 4": Architecture(
        "GraniteMoeHybridConfig",
        "Mamba-2 layers between attention, MoE, multipliers",
        {
            **MAMBA2,
            **EXPERTS,
            "layer_types": ["mamba", "attention"],
            "layers_block_type": ["mamba", "attention"],
            "shared_intermediate_size": INTERMEDIATE,
            "attention_multiplier": 0.2,
        },
        num_blocks=6,
        plain=NO_PREFIXES,
    ),
    "LFM2": Architecture(
        "Lfm2Config",
        "short convolutions between attention",
        {
            "layer_types": ["conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            "block_dim": HIDDEN,
            "block_ff_dim": INTERMEDIATE,
            "conv_dim": HIDDEN,
            "conv_bias": False,
        },
        num_blocks=12,
        plain=NO_PREFIXES,
        **TORCH_POSITIONS,
        **TIED,
    ),
    "Llama 4": Architecture(
        "Llama4TextConfig",
        "MoE, chunked local attention, a layer without positions",
        {
            "head_dim": 32,
            "intermediate_size_mlp": INTERMEDIATE,
            "interleave_moe_layer_step": 1,
            "attention_chunk_size": 32,
            "no_rope_layers": [1, 0],
            "attn_temperature_tuning": True,
            "floor_scale": 16,
            **EXPERTS,
            "num_experts_per_tok": 1,
        },
    ),
    "DeepSeek-V2": Architecture(
        "DeepseekV2Config",
        "MLA, queries not compressed, MoE",
        {**LATENTS, **DEEPSEEK_YARN, "q_lora_rank": None},
        **PLAIN_LATENTS,
    ),
    "DeepSeek-V3": Architecture(
        "DeepseekV3Config",
        "MLA, MoE with biases of the router",
        {**LATENTS, **DEEPSEEK_YARN, "topk_method": "noaux_tc"},
        **PLAIN_LATENTS,
    ),
    "Moonlight": Architecture(
        "DeepseekV3Config",
        "as DeepSeek-V3, queries not compressed (as Kimi-VL)",
        {**LATENTS, "topk_method": "noaux_tc", "q_lora_rank": None},
        **PLAIN_LATENTS,
        **TORCH_POSITIONS,
    ),
    "GLM-4.7-Flash": Architecture(
        "Glm4MoeLiteConfig",
        "MLA, MoE with a float32 router",
        {**LATENTS, "n_routed_experts": 32, "num_local_experts": 32},
        **PLAIN_LATENTS,
        **TORCH_POSITIONS,
    ),
    "Granite W8A8": Architecture("GraniteConfig", "quantised weights: compressed-tensors W8A8 (int8)", weights="w8a8"),
    "Granite LoRA": Architecture(
        "GraniteConfig",
        "half of the requests use an adapter",
        # The shapes of doubles/adapters.py.
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
        # A slot more than adapters: see docs/support.md.  vLLM wants trees of all requests to fit into a chunk.
        num_blocks=9,
        options={"enable_lora": True, "max_loras": 2, "max_num_seqs": 3},
    ),
}

#: Models that are refused: a layer that the message names, and what it says of it.
REFUSED = {
    "Jamba": (
        Architecture(
            "JambaConfig",
            "",
            {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 16, "mamba_dt_rank": 8, **EXPERTS},
        ),
        "model.layers.0.mixer",
        "recurrent state",
    ),
    "Mamba": (Architecture("MambaConfig", "", {"state_size": 16}), "layers.0.mixer", "recurrent state"),
}


def make_config(architecture: Architecture) -> Any:
    cls = getattr(transformers, architecture.config)
    known = {**cls().to_dict(), **cls.attribute_map}
    common = {name: value for name, value in COMMON.items() if name in known}
    return cls(**{**common, **architecture.settings})


def write_target(path: Path, architecture: Architecture, seed: int = 0) -> Any:
    """Save a random model whose next token depends on the context, and return it."""
    config = make_config(architecture)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    scatter(model, architecture, torch.Generator().manual_seed(seed))
    model.eval().save_pretrained(path)
    return model


@torch.no_grad()
def scatter(model: torch.nn.Module, architecture: Architecture, generator: torch.Generator) -> None:
    """Draw all weights: queries and keys large, so that attention is sharp and a wrong key/value row shows."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight is embedding:
            weight.copy_(architecture.embedding * noise)
        elif weight is head:
            weight.copy_(0.35 * noise)
        elif name.endswith("A_log"):
            weight.copy_(noise - 3)  # or a state forgets all but the last tokens
        elif weight.ndim == 1:
            weight.add_(0.1 * noise)
        else:
            sharp = any(part in name for part in ("q_proj", "k_proj", "q_b", "kv_a", "qkv", "query", "c_attn", "Wqkv"))
            weight.copy_(noise * architecture.gain * (3.0 if sharp else 1.0) / HIDDEN**0.5)


@torch.no_grad()
def write_head(path: Path, model: Any, seed: int = 1) -> None:
    """Save an EAGLE head whose ``fc`` is the least-squares fit to ``model``'s greedy answers; its layer is random."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, VOCAB, (64, 8), generator=generator)
    ids = model.generate(prompts, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    base = model.model if model.base_model is model else model.base_model
    hidden = base(ids).last_hidden_state
    embeddings = model.get_input_embeddings().weight[ids]
    inputs = torch.cat([embeddings[:, 1:], hidden[:, :-1]], dim=-1).flatten(0, 1).double()
    fitted = torch.linalg.lstsq(inputs, hidden[:, 1:].flatten(0, 1).double(), driver="gelsd").solution.T.float()
    size = hidden.shape[-1]

    def random(*shape: int) -> torch.Tensor:
        return 0.02 * torch.randn(*shape, generator=generator)

    layer = "layers.0"
    tensors = {f"{layer}.self_attn.{name}_proj.weight": random(size, size) for name in "qkvo"}
    tensors |= {f"{layer}.mlp.{name}_proj.weight": random(INTERMEDIATE, size) for name in ("gate", "up")}
    tensors |= {
        f"{layer}.mlp.down_proj.weight": random(size, INTERMEDIATE),
        f"{layer}.post_attention_layernorm.weight": torch.ones(size),
        "fc.weight": fitted.contiguous(),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "head_dim": size // HEADS,
        "tie_word_embeddings": False,
        "bias": False,
        "torch_dtype": "float32",
        **{name: COMMON[name] for name in ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id")},
        "hidden_size": size,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
    }
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
