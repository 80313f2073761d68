"""P-EAGLE on the V2 runner: an EAGLE-3 head that predicts further positions from mask tokens, all in one forward."""

from __future__ import annotations

from typing import Any

import torch

from vllm_specplug.gpu.drafters.blocks import BestPaths, BlockRows
from vllm_specplug.gpu.drafters.eagle import TreeEagleSpeculator
from vllm_specplug.proposers.dflash.drafting import WIDTH
from vllm_specplug.types import Draft
from vllm_specplug.vllm.drafters.eagle_levels import LevelScratch, run_level
from vllm_specplug.vllm.proof.driver import attributes


class TreePEagleSpeculator(BestPaths, TreeEagleSpeculator):
    """The first forward is that of an EAGLE-3 head: it reads the accepted tokens and predicts the first position.

    In a second one each further position has the mask token and the mask's hidden state; a row sees the context and the
    positions before it.  Its keys and values stay in a scratch.
    """

    _blocks: BlockRows | None = None

    @property
    def level_width(self) -> int:
        return max(self._size, WIDTH)

    @property
    def _size(self) -> int:
        """Return the rows of a request in the second forward."""
        assert self.options.draft_depth is not None
        return self.options.draft_depth - 1

    def load_draft_model(self, target_model: torch.nn.Module, target_attn_layer_names: set[str]) -> torch.nn.Module:
        with attributes(self.speculative_config, parallel_drafting=True):  # the model then has the mask's hidden state
            model = super().load_draft_model(target_model, target_attn_layer_names)
        self._mask_state = model.combine_hidden_states(model.mask_hidden)
        self._mask_token_id = self.draft_model_config.hf_config.ptd_token_id
        return model

    def _draft_by_model(
        self,
        slots: torch.Tensor,
        root_token_ids: torch.Tensor,
        block_table: torch.Tensor,
        positions: torch.Tensor,
        scores: torch.Tensor,
        hidden: torch.Tensor,
    ) -> Draft:
        predicted = scores.unsqueeze(1)
        if self._size:
            predicted = torch.cat([predicted, self._predict(slots, positions, block_table)], dim=1)
        logits = self._scorer.logits(predicted.flatten(0, 1)).unflatten(0, predicted.shape[:2])
        return self._best_paths(root_token_ids, predicted.shape[1], logits, self._scorer.draft_ids)

    def _predict(self, slots: torch.Tensor, positions: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
        """Predict the positions after the first: inputs of the LM head, ``[num_reqs, draft_depth - 1, hidden_size]``.

        Args:
            slots: int ``[num_reqs]``.
            positions: int64 ``[num_reqs]``; of each request's newest row.
            block_table: int32 ``[num_reqs, max_blocks]``.
        """
        num_reqs, size, metadata = len(slots), self._size, None
        if self._blocks is None:  # allocated once, for all requests: recorded graphs hold its addresses
            scratch = LevelScratch(self.vllm_config, self.draft_attn_layer_names, size, self.device)
            self._blocks = BlockRows(scratch, size, self._at_once, True, self.device)
        if self._has_cache:
            context_lens = (positions + 1).masked_fill(slots < 0, 0).to(torch.int32)
            metadata = self._blocks.metadata(block_table, context_lens, self.draft_max_seq_len)
        # Near max_model_len the last positions cannot be emitted anyway.
        places = positions.unsqueeze(1) + torch.arange(1, size + 1, device=self.device)
        inputs: tuple[Any, ...] = (
            torch.full((num_reqs, size), self._mask_token_id, device=self.device),
            self._mask_state.expand(num_reqs, size, -1),
            places.clamp(max=self.max_model_len - 1).flatten(),
        )
        return run_level(self._forward, self._blocks.scratch, *inputs, metadata).score
