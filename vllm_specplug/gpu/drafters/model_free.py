"""The V2 speculator of methods without a draft model of vLLM: model-free ones, and heads on hidden states."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_specplug.gpu.drafters.base import TreeSpeculator


class ModelFreeSpeculator(TreeSpeculator, BaseSpeculator):
    """Drafts from the tokens of each request, which V2 keeps on the device; it has no KV cache of its own."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any):
        self.init_trees(vllm_config, device, req_states)
        self.draft_attn_layer_names: set[str] = set()

    def capture(self) -> None:
        if self._records:
            self._record()

    @torch.inference_mode()
    def draft_trees(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        *args: Any,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        inputs = self._model_inputs(input_batch, last_hidden_states, dummy_run)
        return self._draft(input_batch, dummy_run, last_sampled, *inputs)

    def _model_inputs(self, input_batch: Any, hidden_states: torch.Tensor, dummy_run: bool) -> tuple[torch.Tensor, ...]:
        """Return the arguments of ``_draft_by_model`` besides the roots."""
        return ()
