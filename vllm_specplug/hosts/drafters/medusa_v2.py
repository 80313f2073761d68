"""Medusa heads in place of a V2 speculator of the host: one product per round."""

from __future__ import annotations

from typing import Any

import torch

from vllm_specplug.hosts.drafters.lookup_v2 import TreeLookupSpeculator
from vllm_specplug.hosts.drafters.medusa import MedusaHeadsDrafter
from vllm_specplug.types import Draft


class TreeMedusaSpeculator(TreeLookupSpeculator):
    """Drafts from the target's hidden state at the last accepted row: a row of the walked path, no flat prefix."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any):
        super().__init__(vllm_config, device, req_states)
        self._heads = MedusaHeadsDrafter(vllm_config)
        shape = (vllm_config.scheduler_config.max_num_seqs, vllm_config.model_config.get_hidden_size())
        self._no_hidden = torch.zeros(shape, dtype=vllm_config.model_config.dtype, device=device)

    def load_heads(self, target_model: torch.nn.Module) -> None:
        self._heads.load(target_model)

    def capture(self) -> None:
        if self._records:
            self._record(self._no_hidden)

    def _model_inputs(
        self, input_batch: Any, hidden_states: torch.Tensor, num_rejected: torch.Tensor, dummy_run: bool
    ) -> tuple[torch.Tensor, ...]:
        rows = input_batch.query_start_loc[1 : input_batch.num_reqs + 1].long() - 1 - num_rejected
        if not dummy_run:
            rows = self.trees.accepted_rows(rows)
        return (hidden_states[rows],)

    def _draft_by_model(self, root_token_ids: torch.Tensor, *inputs: torch.Tensor) -> Draft:
        return self._heads.draft(root_token_ids, *inputs)
