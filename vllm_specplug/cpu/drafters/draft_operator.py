"""The C++ draft phase of an EAGLE head, made of vLLM's model of it where the operators can compute the same.

vLLM runs a head as any model: about a millisecond of Python for each level, with one layer to compute.
"""

from __future__ import annotations

import torch
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.llama import LlamaAttention, LlamaMLP
from vllm.model_executor.models.llama_eagle import LlamaDecoderLayer

from vllm_specplug.cpu.drafters.draft_linear import draft_linear
from vllm_specplug.cpu.kernels.draft_layer import DraftLayer, LayerWeights
from vllm_specplug.vllm.drafters.eagle_model import SpecPlugEagleForCausalLM

#: Lengths that vectors of each CPU divide.
_LANES = 16


def draft_layer_of(model: torch.nn.Module, dtype: torch.dtype, capacity: int, max_position: int) -> DraftLayer | None:
    """Return what runs vLLM's draft model; None if it is another kind of model, or has parts of its own.

    Args:
        model: its weights are packed.
        dtype: of the hidden states.
        capacity, max_position: see ``DraftLayer`` and ``LayerWeights``.
    """
    if type(model) is not SpecPlugEagleForCausalLM:
        return None
    head, layers = model.model, list(model.model.layers)
    if get_tensor_model_parallel_world_size() > 1 or len(layers) > 1 or type(layers[0]) is not LlamaDecoderLayer:
        return None
    (layer,) = layers
    attention, mlp, norm = layer.self_attn, layer.mlp, layer.post_attention_layernorm
    rotary, embedding, attend = attention.rotary_emb, head.embed_tokens, attention.attn
    weight = getattr(embedding, "weight", None)
    parts = [head.fc, attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj]
    linear = [one for part in parts if (one := draft_linear(part)) is not None]
    is_plain = (
        (type(attention), type(mlp), type(norm)) == (LlamaAttention, LlamaMLP, RMSNorm)
        and type(layer.input_layernorm) is torch.nn.Identity
        and type(rotary) in (RotaryEmbedding, Llama3RotaryEmbedding)
        and rotary.is_neox_style
        and rotary.cos_sin_cache.shape[1] == attention.head_dim
        and type(embedding) is VocabParallelEmbedding
        and not getattr(attention, "do_llama_4_scaling", False)
        and weight.dtype == norm.weight.dtype == dtype
        and weight.shape[1] % _LANES == 0
        and mlp.gate_up_proj.output_size % (2 * _LANES) == 0
        and attend.impl.kv_sharing_target_layer_name is None
        and attend.impl.traits.adds_nothing
        and not attend.impl.is_fp8
        and len(linear) == len(parts)
    )
    if not is_plain:
        return None
    weights = LayerWeights(
        weight.data,
        rotary.cos_sin_cache,
        norm.weight.data,
        norm.variance_epsilon,
        attention.scaling,
        attention.num_heads,
        *linear,
        max_position,
    )
    return DraftLayer(weights, capacity, attend)
