"""DFlash on the V1 runner: vLLM's model and paged KV of the context; a tree from the distributions of all positions."""

from __future__ import annotations

from typing import Any

import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.dflash import DFlashProposer

from vllm_specplug.cpu.attention import level_metadata
from vllm_specplug.cpu.drafters.best_first import BestFirstDrafter
from vllm_specplug.cpu.drafters.levels import plain_positions
from vllm_specplug.types import Draft
from vllm_specplug.vllm.drafters.block_head import BlockHead
from vllm_specplug.vllm.drafters.setup import target_info
from vllm_specplug.vllm.drafters.target_parts import TargetParts
from vllm_specplug.vllm.proof.driver import attributes


class TreeDFlashProposer(BestFirstDrafter, DFlashProposer):
    """A head that reads the target's hidden states as its context, and predicts a block of positions in one forward.

    The keys and values of the context come from the accepted path's hidden states and go to the pages.  Those of the
    block, the root and a mask token for each position, stay in a scratch: each row sees the context and, unless the
    head is causal, the whole block.
    """

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any):
        super().__init__(vllm_config, device, runner)
        runner.use_aux_hidden_state_outputs = self.eagle3_use_aux_hidden_state  # vLLM's runner takes them for read

    def load_model(self, target_model: torch.nn.Module) -> None:
        parts = TargetParts(target_model, target_info(self.vllm_config.model_config))
        with attributes(self.speculative_config, num_speculative_tokens=self.options.draft_depth):  # rows of a block
            super().load_model(parts)
        self._head = BlockHead(self.model)
        self._size = self.options.scratch_rows - self._head.predicts_at_root
        block = torch.ones(self._size, self._size, dtype=torch.bool)
        self._mask = block.tril() if self.dflash_causal else block

    def _read(
        self,
        target_hidden_states: torch.Tensor,
        target_positions: torch.Tensor,
        common_attn_metadata: CommonAttentionMetadata,
        **_: Any,
    ) -> None:
        """Write the keys and values of context rows."""
        positions = plain_positions(target_positions)
        context = self.model.combine_hidden_states(target_hidden_states)
        slots = common_attn_metadata.slot_mapping[: len(context)]
        self.model.precompute_and_store_context_kv(context, positions, slots)

    def propose(self, next_token_ids: torch.Tensor, **kwargs: Any) -> Draft:  # type: ignore[override]
        """Draft one tree per request; vLLM would draft a chain."""
        self._read(**kwargs)
        metadata = kwargs["common_attn_metadata"]
        last = plain_positions(kwargs["target_positions"])[metadata.query_start_loc[1:].long() - 1]
        hidden = self._predict(next_token_ids, last + 1, metadata.seq_lens, metadata.block_table_tensor)
        if not self._head.is_pairwise:
            return self._best_first(next_token_ids, hidden)
        self._head.read(hidden)
        return self._by_pairs(next_token_ids, hidden.shape[1], self._logits_after)

    def _logits(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.model.compute_logits(hidden), None

    def _logits_after(self, position: int, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._head.logits_after(position, token_ids), self._head.draft_ids

    def _predict(
        self,
        root_token_ids: torch.Tensor,
        root_positions: torch.Tensor,
        context_lens: torch.Tensor,
        block_table: torch.Tensor,
    ) -> torch.Tensor:
        """Run the head over the blocks: hidden states ``[num_reqs, num_positions, hidden_size]``."""
        num_reqs, size = len(root_token_ids), self._size
        token_ids = torch.full((num_reqs, size), self.parallel_drafting_token_id, dtype=torch.int32)
        token_ids[:, 0] = root_token_ids
        # Near max_model_len the last positions cannot be emitted anyway.
        positions = (root_positions.unsqueeze(1) + torch.arange(size)).clamp(max=self.max_model_len - 1)
        starts, rows = self._scratch.places(num_reqs, size, 0)
        scratch = self._scratch.scratch.at(rows, num_reqs * size)
        mask = self._mask.expand(num_reqs, -1, -1)
        metadata = level_metadata(block_table[:num_reqs], context_lens, starts, mask, scratch)
        with set_forward_context(
            dict.fromkeys(self._scratch.layer_names, metadata),
            self.vllm_config,
            num_tokens=token_ids.numel(),
            slot_mapping={},
        ):
            hidden = self.model(input_ids=token_ids.flatten(), positions=positions.flatten(), inputs_embeds=None)
        hidden = hidden.unflatten(0, token_ids.shape)
        return hidden if self._head.predicts_at_root else hidden[:, 1:]
