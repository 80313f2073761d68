"""An EAGLE head's draft phase in C++ operators, where they can compute what vLLM's model of it does.

vLLM runs a head as any model: about a millisecond of Python for each level, with one layer to compute.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.llama import LlamaAttention, LlamaMLP
from vllm.model_executor.models.llama_eagle import LlamaDecoderLayer

from vllm_specplug.config import Eagle2Options
from vllm_specplug.cpu.drafters.draft_linear import draft_linear
from vllm_specplug.cpu.drafters.levels import Growth
from vllm_specplug.cpu.kernels.draft_layer import DraftLayer, DraftVocabulary, LayerWeights
from vllm_specplug.proposers.eagle2.drafting import DraftFeatures
from vllm_specplug.types import Draft
from vllm_specplug.vllm.drafters.eagle_model import SpecPlugEagleForCausalLM

#: Lengths that vectors of each CPU divide.
_LANES = 16


class DraftOperator:
    """Runs an EAGLE head of one layer.

    Args:
        attention: vLLM's attention layer of the head.
        layer: with the head's weights.
    """

    def __init__(self, attention: Any, layer: DraftLayer):
        self._attention, self._layer = attention, layer
        self._num_reqs = 0  # of the draft phase

    @classmethod
    def make(cls, model: torch.nn.Module, dtype: torch.dtype, capacity: int, max_position: int) -> DraftOperator | None:
        """Return the operator of vLLM's draft model; None if it is another kind of model, or has parts of its own.

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
        return cls(attend, DraftLayer(weights, capacity))

    def first(
        self,
        token_ids: torch.Tensor,
        starts: torch.Tensor,
        counts: torch.Tensor,
        hidden_states: torch.Tensor,
        rows: torch.Tensor | None,
        block_table: torch.Tensor,
    ) -> DraftFeatures:
        """Begin a draft phase, see ``DraftLayer.first``: features ``[num_reqs, hidden_size]``."""
        self._num_reqs = len(counts)
        pages = self._attention.kv_cache, self._attention.isa == "amx"
        features = self._layer.first(token_ids, starts, counts, hidden_states, rows, *pages, block_table)
        return DraftFeatures(features, features)

    def forward(self, level: int, token_ids: torch.Tensor, features: torch.Tensor, mask: torch.Tensor) -> DraftFeatures:
        """Run a level, see ``proposers.eagle2.drafting.grow_tree``."""
        outputs = self._layer.level(level, token_ids, features, mask)
        return DraftFeatures(outputs, outputs)

    def grow(
        self,
        root_token_ids: torch.Tensor,
        root: torch.Tensor,
        vocabulary: DraftVocabulary,
        growth: Growth,
        options: Eagle2Options,
    ) -> Draft:
        """Draft all levels in one call, see ``DraftLayer.grow``; ``growth`` gets what they were."""
        draft, growth.beams, growth.level_seconds = self._layer.grow(
            root_token_ids,
            root,
            vocabulary,
            num_nodes=options.num_speculative_tokens,
            draft_top_k=options.draft_top_k,
            level_floors=growth.floors,
            min_node_value=options.node_floor,
        )
        return draft

    def run(self, rows: int, hidden_states: torch.Tensor, is_first: bool, block_table: torch.Tensor) -> torch.Tensor:
        """Run a forward over rows of one request, to time it; a first one writes to the blocks of ``block_table``."""
        token_ids = torch.zeros(1, rows + 1, dtype=torch.int32)
        if is_first or self._num_reqs != 1:  # a level is timed after the first forward of one request
            counts = torch.tensor([rows if is_first else 1])
            output = self.first(token_ids, torch.zeros_like(counts), counts, hidden_states, None, block_table).score
            if is_first:
                return output
        mask = torch.eye(rows, dtype=torch.bool).unsqueeze(0)
        features = hidden_states[:rows].unsqueeze(0)
        return self._layer.level(0, token_ids[:, :rows].long(), features, mask, capacity=rows).flatten(0, 1)
