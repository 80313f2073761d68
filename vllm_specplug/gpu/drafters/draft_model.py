"""A small model as drafter on the V2 runner: vLLM's class, paged KV and first forward; trees level by level."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from vllm_specplug.config import ConfigError
from vllm_specplug.gpu.drafters.eagle import LevelSpeculator
from vllm_specplug.vllm.drafters.draft_model import DraftModelScorer


class TreeDraftModelSpeculator(LevelSpeculator, StandaloneARSpeculator):
    """A model that reads tokens alone: the accepted ones, brought into path order, and the last emitted one."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any):
        super().__init__(vllm_config, device, req_states)
        #: Position of each request's last emitted token.
        self._root_positions = torch.zeros(self.max_num_reqs, dtype=torch.int64, device=device)

    def load_draft_model(self, target_model: torch.nn.Module, target_attn_layer_names: set[str]) -> torch.nn.Module:
        model = super().load_draft_model(target_model, target_attn_layer_names)
        scorer = DraftModelScorer(model, self.vllm_config)
        if scorer.max_position < self.max_model_len - 1 or not scorer.has_all:
            raise ConfigError(
                f"method {self.options.method!r} on vLLM's V2 model runner: the drafter {self.options.model!r} has "
                f"{scorer.max_position + 1} positions and {self.vocab_size} tokens, the model {self.max_model_len} and "
                f"{self.vllm_config.model_config.get_vocab_size()}: use a larger drafter or a lower --max-model-len"
            )
        self._score_with(scorer, self.vocab_size)
        return model

    def _forward(self, hidden_states: torch.Tensor | None = None, **inputs: Any) -> Any:
        return self.model(**inputs)

    def sample_draft(self, hidden_states: torch.Tensor, positions: torch.Tensor, *_: Any) -> torch.Tensor:
        self._root_positions[: len(positions)].copy_(positions)
        return super().sample_draft(hidden_states)

    def capture(self) -> None:
        if self._records:  # the growth; vLLM runs the first forward without graphs
            self._has_cache = True  # vLLM may capture before the first draft phase on the cache
            self._record(self._empty_block_table(), *self._roots())

    def _roots(self) -> tuple[torch.Tensor, ...]:
        """Return the result of the first forward for each request: position of its root, score twice."""
        return self._root_positions, self.root_scores, self.root_scores

    @torch.inference_mode()
    def draft_trees(
        self,
        input_batch: Any,
        attn_metadata: dict[str, Any] | None,
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
        batch = (input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states)
        self._read(*batch, num_sampled, num_rejected, last_sampled, *args, dummy_run=dummy_run, **kwargs)
        self._has_cache = attn_metadata is not None
        block_table = self._block_table(attn_metadata, input_batch.num_reqs)
        return self._draft(input_batch, dummy_run, last_sampled, block_table, *self._roots())

    @torch.inference_mode()
    def keep_up(self, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._read(input_batch, *args, **kwargs)
        return self.draft_nothing(input_batch)

    def _read(self, input_batch: Any, *args: Any, dummy_run: bool = False, **kwargs: Any) -> None:
        """Run vLLM's first forward; takes the arguments of ``propose``."""
        if not dummy_run:
            self.trees.linearise(input_batch)
        steps, self.num_speculative_steps = self.num_speculative_steps, 1
        try:
            StandaloneARSpeculator.propose(self, input_batch, *args, dummy_run=dummy_run, **kwargs)
        finally:
            self.num_speculative_steps = steps
