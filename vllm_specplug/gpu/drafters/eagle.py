"""EAGLE on the V2 runner: vLLM's model loading, paged KV and first forward; our growth of trees."""

from __future__ import annotations

import copy
from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import prepare_prefill_inputs

from vllm_specplug.config import ConfigError, GrownOptions
from vllm_specplug.core.draft_sampling import Children
from vllm_specplug.gpu.drafters.base import TreeSpeculator
from vllm_specplug.gpu.drafters.eagle_levels import DeviceLevels, LevelRows
from vllm_specplug.gpu.kernels.growth import KERNELS, likeliest
from vllm_specplug.proposers.eagle2.drafting import DraftFeatures, grow_tree
from vllm_specplug.types import Draft
from vllm_specplug.vllm.drafters.context_writer import ContextWriter
from vllm_specplug.vllm.drafters.eagle_levels import EagleScorer, LevelScratch
from vllm_specplug.vllm.drafters.setup import target_info
from vllm_specplug.vllm.drafters.target_parts import TargetHead, TargetParts


def alone(vllm_config: Any) -> Any:
    """Return the configuration as a single replica has it: a drafter without experts has no part that others share.

    So no draft phase waits for another replica, which may draft another number of levels, or nothing.
    """
    config, config.parallel_config = copy.copy(vllm_config), copy.copy(vllm_config.parallel_config)
    config.parallel_config.data_parallel_size = 1
    return config


class LevelSpeculator(TreeSpeculator):
    """Mixed into a speculator of vLLM whose drafter is a model, in front of it.

    The first forward of a draft phase is vLLM's own.  The levels after it keep their key/value in a scratch that is not
    kept.
    """

    options: GrownOptions

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any):
        super().__init__(alone(vllm_config), device)
        self.init_trees(vllm_config, device, req_states)
        #: Input of the LM head for each request's newest token; ``hidden_states`` holds what its children are fed.
        self.root_scores = torch.zeros(self.max_num_reqs, self.hidden_size, dtype=self.dtype, device=device)
        self._rows: LevelRows | None = None
        self._has_cache = True

    @property
    def level_width(self) -> int:
        """Return the rows of a request in a draft level."""
        return self.options.draft_top_k

    def _score_with(self, scorer: Any, draft_vocab: int) -> None:
        """Take what computes logits, of ``draft_vocab`` tokens."""
        self._scorer, self._at_once = scorer, self._most_at_once(draft_vocab)
        for growth in self._growths.values():
            growth.at_once = min(growth.at_once, self._at_once)

    def _forward(self, **inputs: Any) -> Any:
        """Run the model over the nodes of a level; takes the arguments of a vLLM model that reads hidden states."""
        return self.model(**inputs)

    def _most_at_once(self, draft_vocab: int) -> int:
        """Return how many requests one draft level may have.

        vLLM compiles the drafter for at most ``max_num_batched_tokens`` rows, and bounds its copies of logits.

        Raises:
            ConfigError: one request has more.
        """
        width = self.level_width
        if width > self.max_num_tokens:
            raise ConfigError(
                f"a draft level has {width} rows, which do not fit in max_num_batched_tokens={self.max_num_tokens}: "
                "use a larger one, or a lower draft_top_k"
            )
        rows = min(self.max_num_tokens, get_max_chunk_logits(draft_vocab))
        return max(1, min(self.max_num_reqs, rows // width))

    def sample_draft(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Keep the hidden states that vLLM would sample its first draft from; the returned tokens are not used."""
        num_reqs = hidden_states.shape[0]
        self.root_scores[:num_reqs].copy_(hidden_states)
        return torch.zeros(num_reqs, dtype=torch.int64, device=hidden_states.device)

    def _draft_by_model(
        self,
        slots: torch.Tensor,
        root_token_ids: torch.Tensor,
        block_table: torch.Tensor,
        positions: torch.Tensor,
        scores: torch.Tensor,
        hidden: torch.Tensor,
    ) -> Draft:
        """Grow the levels after the first forward, from ``_roots`` and the block table ``[num_reqs, max_blocks]``."""
        if self._rows is None:  # allocated once, for all requests: recorded graphs hold its addresses
            rows = self.options.scratch_rows
            scratch = LevelScratch(self.vllm_config, self.draft_attn_layer_names, rows, self.device)
            levels = self.options.draft_depth - 1
            self._rows = LevelRows(scratch, self.options.draft_top_k, levels, self._at_once, self.device)
        levels = DeviceLevels(
            self._forward,
            self._rows,
            slots,
            positions,
            block_table if self._has_cache else None,
            self.draft_max_seq_len,
        )
        return grow_tree(
            root_token_ids,
            DraftFeatures(scores, hidden),
            self._score,
            levels.forward,
            num_nodes=min(self.options.num_speculative_tokens, self.draft_nodes),
            draft_depth=min(self.draft_depth, self.options.draft_depth),
            draft_top_k=self.options.draft_top_k,
            ops=KERNELS,
        )

    def _score(self, level: int, hidden: torch.Tensor, top_k: int) -> Children:
        logits, draft_ids = self._scorer.logits(hidden), self._scorer.draft_ids
        if self.sampling is None:
            return likeliest(logits, top_k, draft_ids)
        return self.sampling.children(logits, level, top_k, draft_ids)


class TreeEagleSpeculator(LevelSpeculator, EagleSpeculator):
    """EAGLE-2 (and EAGLE-3 heads in EAGLE-2 trees).

    The first forward of a draft phase is vLLM's own.  It runs the drafter over the accepted tokens with the target's
    hidden states (stable KV), on rows that were brought into path order.  The levels after it keep their key/value in
    a scratch that is not kept.
    """

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any):
        super().__init__(vllm_config, device, req_states)
        #: Writes key/value only; None: the drafter's whole forward runs.
        self._writer: ContextWriter | None = None

    # ---- loading

    def load_draft_model(self, target_model: torch.nn.Module, target_attn_layer_names: set[str]) -> torch.nn.Module:
        target = target_info(self.vllm_config.model_config)
        model = super().load_draft_model(TargetParts(target_model, target), target_attn_layer_names)
        scorer = EagleScorer(model, TargetHead(target_model, target.hidden_size, self.dtype), in_int8=False)
        ids = scorer.draft_ids
        self._score_with(scorer, self.vocab_size if ids is None else len(ids))
        if ContextWriter.supports(model) and not self.supports_mm_inputs:
            self._writer = ContextWriter(model)
        return model

    def capture(self) -> None:
        # Only the first forward is vLLM's; its graphs for chains would never run.
        steps, self.num_speculative_steps = self.num_speculative_steps, 1
        try:
            super().capture()
        finally:
            self.num_speculative_steps = steps
        if self.decode_cudagraph_manager is not None and self.decode_cudagraph_manager.needs_capture():
            self._has_cache = True  # vLLM may capture before the first draft phase on the cache
            self.draft_max_seq_len = self.max_model_len  # bounds the splits of the recorded kernels
            self._record(self._empty_block_table(), *self._roots())

    def _roots(self) -> tuple[torch.Tensor, ...]:
        """Return the result of the first forward for each request: position of its newest row, score, hidden state."""
        return self.input_buffers.positions, self.root_scores, self.hidden_states

    # ---- one draft phase

    @torch.inference_mode()
    def draft_trees(
        self,
        input_batch: Any,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        *args: Any,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        if not dummy_run:
            last_hidden_states, aux_hidden_states = self._accepted(input_batch, last_hidden_states, aux_hidden_states)
        EagleSpeculator.propose(
            self,
            input_batch,
            attn_metadata,
            slot_mappings,
            last_hidden_states,
            aux_hidden_states,
            num_sampled,
            num_rejected,
            last_sampled,
            *args,
            **{**kwargs, "dummy_run": dummy_run, "num_speculative_tokens": 1},
        )
        self._has_cache = attn_metadata is not None
        block_table = self._block_table(attn_metadata, input_batch.num_reqs)
        return self._draft(input_batch, dummy_run, last_sampled, block_table, *self._roots())

    def _accepted(
        self, input_batch: Any, last_hidden_states: torch.Tensor, aux_hidden_states: list[torch.Tensor] | None
    ) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """Bring the step's rows into path order, so that vLLM's first forward reads the accepted tokens."""
        self.trees.linearise(input_batch)
        aux = [self.trees.in_path_order(hidden) for hidden in aux_hidden_states] if aux_hidden_states else None
        return self.trees.in_path_order(last_hidden_states), aux

    @torch.inference_mode()
    def keep_up(
        self,
        input_batch: Any,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Write the key/value of the step's tokens, so that a later round can draft.

        Of a drafter with one layer nothing else is computed: no attention, no MLP, no LM head.
        """
        hidden, aux = self._accepted(input_batch, last_hidden_states, aux_hidden_states)
        # Query lengths, sampled and rejected tokens, and what is read next: as in vLLM's first forward.
        counts = (num_sampled, num_rejected, last_sampled, next_prefill_tokens)
        if self._writer is None:
            batch = (input_batch, attn_metadata, slot_mappings, hidden, aux)
            EagleSpeculator.propose(self, *batch, *counts, *args, **{**kwargs, "num_speculative_tokens": 0})
        else:
            buffers, rows = self.input_buffers, slice(input_batch.num_tokens)
            prepare_prefill_inputs(
                self.last_token_indices, self.current_draft_step, buffers, input_batch, *counts, self.max_num_reqs
            )
            hidden = torch.cat(aux, dim=-1) if aux else hidden
            slots = slot_mappings[next(iter(self.draft_attn_layer_names))]
            self._writer.write(buffers.input_ids[rows], buffers.positions[rows], hidden[rows], slots[rows])
        return self.draft_nothing(input_batch)
