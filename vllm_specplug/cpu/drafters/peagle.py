"""P-EAGLE on the V1 runner: an EAGLE-3 head that predicts further positions from mask tokens, all in one forward."""

from __future__ import annotations

from typing import Any

import torch

from vllm_specplug.cpu.attention import level_metadata
from vllm_specplug.cpu.drafters.best_first import BestFirstDrafter
from vllm_specplug.cpu.drafters.eagle import TreeEagleProposer
from vllm_specplug.types import Draft
from vllm_specplug.vllm.drafters.eagle_levels import pair_of, run_level
from vllm_specplug.vllm.proof.driver import attributes


class TreePEagleProposer(BestFirstDrafter, TreeEagleProposer):
    """The first forward is that of an EAGLE-3 head: it reads the accepted tokens and predicts the first position.

    In a second one each further position has the mask token and the mask's hidden state; a row sees the context and the
    positions before it.  Its keys and values stay in a scratch.
    """

    def load_model(self, target_model: torch.nn.Module) -> None:
        with attributes(self.speculative_config, parallel_drafting=True):  # the model then has the mask's hidden state
            super().load_model(target_model)
        self._mask_state = self.model.combine_hidden_states(self.model.mask_hidden)
        self._mask_token_id = self.draft_model_config.hf_config.ptd_token_id

    def propose(self, **kwargs: Any) -> Draft:  # type: ignore[override]
        """Draft one tree per request; vLLM would draft a chain."""
        self._read(**kwargs)
        num_rows, rows, metadata = self._first_pass
        score, _ = pair_of(self._last_output)
        hidden = score[rows].unsqueeze(1)
        if self.options.draft_depth > 1:
            further = self._predict(self._get_positions(num_rows)[rows], metadata)
            hidden = torch.cat([hidden, further], dim=1)
        return self._best_first(kwargs["next_token_ids"], hidden)

    def _predict(self, positions: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Predict the positions after the first: inputs of the LM head, ``[num_reqs, draft_depth - 1, hidden_size]``.

        Args:
            positions: int64 ``[num_reqs]``; of each request's newest row.
            metadata: of the first forward.
        """
        num_reqs, size = len(positions), self.options.draft_depth - 1
        starts, rows = self._scratch.places(num_reqs, size, 0)
        scratch = self._scratch.scratch.at(rows, num_reqs * self._scratch.capacity)
        mask = torch.ones(size, size, dtype=torch.bool).tril().expand(num_reqs, -1, -1)
        table, context_lens = metadata.block_table_tensor[:num_reqs], metadata.seq_lens[:num_reqs]
        # Near max_model_len the last positions cannot be emitted anyway.
        places = (positions.unsqueeze(1) + torch.arange(1, size + 1)).clamp(max=self.max_model_len - 1)
        return run_level(
            self._forward,
            self._scratch,
            torch.full((num_reqs, size), self._mask_token_id),
            self._mask_state.expand(num_reqs, size, -1),
            places.flatten(),
            level_metadata(table, context_lens, starts, mask, scratch),
        ).score
