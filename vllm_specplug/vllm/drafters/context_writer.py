"""Writes a drafter's key/value of context rows without the rest of its forward.

In a drafter with one layer, rows from which no draft grows are needed as key/value only.  Their attention, its output
projection and the MLP, most of the work, are left out.  Prompts are read this way, and rows that were missed while
drafting paused.
"""

from __future__ import annotations

import torch

from vllm_specplug.proposers.eagle2 import EAGLE3_ARCHITECTURES
from vllm_specplug.vllm.drafters.eagle_model import SpecPlugEagleForCausalLM


class ContextWriter:
    """Computes and writes the key/value of a drafter's only layer.

    Args:
        model: one that ``supports`` accepts.
    """

    def __init__(self, model: torch.nn.Module):
        self._model = model
        (self._layer,) = model.model.layers
        self._attention = self._layer.self_attn

    @staticmethod
    def supports(model: torch.nn.Module) -> bool:
        """Return whether ``model`` is an EAGLE drafter of one layer as vLLM builds it, and no derived class."""
        is_known = type(model) is SpecPlugEagleForCausalLM or type(model).__qualname__ in EAGLE3_ARCHITECTURES
        return is_known and len(model.model.layers) == 1

    def key_value(
        self, token_ids: torch.Tensor, positions: torch.Tensor, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the key/value of these rows.

        Args:
            token_ids: int ``[num_rows]``; the token after each row's own.
            positions: int ``[num_rows]``.
            hidden_states: ``[num_rows, hidden_size]``; of EAGLE-3: its aux layers combined.

        Returns:
            Each ``[num_rows, num_kv_heads, head_size]``.
        """
        head, layer, attention = self._model.model, self._layer, self._attention
        embeddings = head.embed_tokens(token_ids)
        if isinstance(self._model, SpecPlugEagleForCausalLM):
            inputs = layer.input_layernorm(head.fc(torch.cat((embeddings, hidden_states), dim=-1)))
        else:
            inputs = torch.cat((layer.input_layernorm(embeddings), layer.hidden_norm(hidden_states)), dim=-1)
        projected, _ = attention.qkv_proj(inputs)
        query, key, value = projected.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
        shape = (len(token_ids), -1, attention.head_dim)
        if hasattr(attention, "k_norm"):  # of Qwen3
            key = attention.k_norm(key.reshape(shape)).reshape(key.shape)
        _, key = attention.rotary_emb(positions, query, key)
        return key.reshape(shape), value.reshape(shape)

    def write(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write ``key_value`` to the drafter's pages; ``slot_mapping`` int64 ``[num_rows]``.

        ``hidden_states`` are the target's; for EAGLE-3 those of its aux layers side by side.
        """
        if not isinstance(self._model, SpecPlugEagleForCausalLM):
            hidden_states = self._model.combine_hidden_states(hidden_states)
        key, value = self.key_value(token_ids, positions, hidden_states)
        layer = self._attention.attn
        layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slot_mapping)
