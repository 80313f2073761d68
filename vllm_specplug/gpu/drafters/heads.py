"""Heads on the target's hidden states (``proposer.Heads``) on the V2 runner: one forward of the heads per step."""

from __future__ import annotations

from typing import Any

import torch

from vllm_specplug.gpu.drafters.model_free import ModelFreeSpeculator
from vllm_specplug.types import Draft
from vllm_specplug.vllm.drafters.setup import make_heads


class HeadsSpeculator(ModelFreeSpeculator):
    """Drafts from the target's hidden state at each request's last accepted row."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any):
        super().__init__(vllm_config, device, req_states)
        self.heads = make_heads(vllm_config)
        shape = (vllm_config.scheduler_config.max_num_seqs, vllm_config.model_config.get_hidden_size())
        self._no_hidden = torch.zeros(shape, dtype=vllm_config.model_config.dtype, device=device)

    def load_heads(self, target_model: torch.nn.Module) -> None:
        self.heads.load(target_model)

    def capture(self) -> None:
        if self._records:
            self._record(self._no_hidden)

    def _model_inputs(self, input_batch: Any, hidden_states: torch.Tensor, dummy_run: bool) -> tuple[torch.Tensor, ...]:
        if dummy_run:
            return (hidden_states[: input_batch.num_reqs],)
        return (hidden_states[self.trees.last_rows(input_batch)],)

    def _draft_by_model(self, _slots: torch.Tensor, root_token_ids: torch.Tensor, *inputs: torch.Tensor) -> Draft:
        return self.heads.draft(root_token_ids, *inputs, sampling=self.sampling)
