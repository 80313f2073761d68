"""vLLM's CPU runner with draft trees: its overrides call the phases of ``step.py`` one to one."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_specplug.core.step import StepPlan, plain_plan
from vllm_specplug.cpu.accepting_walk import RejectionWalk, TypicalWalk
from vllm_specplug.cpu.draft import DraftPhase
from vllm_specplug.cpu.drafters.flat_draft import FlatDraft
from vllm_specplug.cpu.greedy_head import GreedyHead
from vllm_specplug.cpu.kernels.tree_ops import greedy_tokens, walks_greedily
from vllm_specplug.cpu.kv import KeptRows
from vllm_specplug.cpu.place_free import PlaceFree
from vllm_specplug.cpu.processors import custom_processors_hidden, restore_processors, restore_thinking_budget
from vllm_specplug.cpu.reloading import Reloading
from vllm_specplug.cpu.scheduler import attach_drafts
from vllm_specplug.cpu.state_layers import StateLayers
from vllm_specplug.cpu.states import state_rows
from vllm_specplug.cpu.step import Step, commit, stage, verify, walk
from vllm_specplug.cpu.turns import DrawnStates
from vllm_specplug.cpu.walk import SampledWalk, is_argmax
from vllm_specplug.types import Walk
from vllm_specplug.utils.frames import with_room
from vllm_specplug.utils.metrics import Counters
from vllm_specplug.utils.processes import ChildProgram
from vllm_specplug.vllm.kv_groups import alike_layers
from vllm_specplug.vllm.plain_sampling import limits_of
from vllm_specplug.vllm.proof.driver import attributes
from vllm_specplug.vllm.ranks import leads
from vllm_specplug.vllm.states import specs_for_trees
from vllm_specplug.vllm.trace import TreeTrace


class TreeCPUModelRunner(DraftPhase, CPUModelRunner):
    """vLLM's CPU runner, whose drafts are trees."""

    greedy_head: GreedyHead | None = None
    #: The target's layers with recurrent states; set when it is loaded.
    state_layers: StateLayers

    def __init__(self, vllm_config: Any, device: torch.device):
        with custom_processors_hidden(vllm_config.model_config):
            super().__init__(vllm_config, device)
        options = self.speculative_config.specplug
        # Every tensor-parallel rank does the same; one of them counts and traces.
        reports = leads()
        self._counters = Counters(
            self.speculative_config.metrics_file if reports else None, vllm_config.parallel_config.data_parallel_index
        )
        self._verify_start = 0.0
        self._trace = TreeTrace(options.trace_trees) if reports and options.trace_trees else None
        self._step: Step | None = None
        self._drawn_states = DrawnStates()
        self._flat_rows = torch.arange(self.max_num_tokens)
        self._attn_metadata: dict[str, Any] = {}
        self.num_accepted_tokens_event = None  # states are those of plain decoding: see ``StateLayers``
        self.reloading: Reloading | None = None
        self.trainer: ChildProgram | None = None
        self._has_custom_processors = restore_processors(self)
        self._init_drafting(vllm_config, device, self._has_custom_processors)

    def may_reinitialize_input_batch(self, *args: Any, **kwargs: Any) -> None:
        super().may_reinitialize_input_batch(*args, **kwargs)
        restore_thinking_budget(self)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return specs_for_trees(super().get_kv_cache_spec())

    def initialize_metadata_builders(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_metadata_builders(*args, **kwargs)
        if self.state_layers.layers:
            self.state_layers.build_by(self.attn_groups, lambda: None if self._step is None else self._step.states)
            self.calculate_reorder_batch_threshold()

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)
        layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)
        target = {
            name: layer
            for name, layer in layers.items()
            if name not in self.drafter.draft_layers and name not in self.state_layers.layers
        }
        #: The target's layers, for the commit.
        self.alike_layers = alike_layers(self.kv_cache_config, target)
        self._kept_rows = KeptRows(self.alike_layers)

    def prepare_greedy_head(self) -> None:
        """Let greedy steps compute fewer logits; called at the end of the start, when the weights are packed."""
        config = self.model_config
        if not self.lora_config and get_pp_group().is_last_rank:
            self.greedy_head = GreedyHead.make(self.model, config.get_hidden_size(), config.dtype)

    @with_room
    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self.reloading is not None:
            self.reloading.before_step()
        self._begin_step(scheduler_output)
        return super().execute_model(scheduler_output, *args, **kwargs)

    @with_room
    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)
        self._end_step()
        return attach_drafts(output, self.take_draft_token_ids())

    def follow_versions(self) -> None:
        """Take published versions of the drafter from now on, if that is asked for; called at the end of the start."""
        config = self.speculative_config
        if config.published_head is not None:
            self.reloading = Reloading(
                self.drafter, config.published_head, config.published_folder, self.requests, self._counters
            )
        if config.trainer and leads() and self.vllm_config.parallel_config.data_parallel_index == 0:
            self.trainer = ChildProgram(config.trainer, Path(config.published_head).parent / "learn.log")

    # ---- before the forward

    def _update_states(self, scheduler_output: Any) -> Any:
        if scheduler_output.finished_req_ids:
            self._finish_requests(scheduler_output.finished_req_ids)
            self._drawn_states.finish(scheduler_output.finished_req_ids)
        for new in scheduler_output.scheduled_new_reqs:
            self._begin_request(new)
            if new.req_id in self.requests and new.req_id not in scheduler_output.finished_req_ids:
                self._drawn_states.begin_turn(self.requests[new.req_id], new.num_computed_tokens)
        return super()._update_states(scheduler_output)

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        self._verify_start = time.perf_counter()
        self._step, self._scheduled = None, num_scheduled_tokens
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        if scheduler_output.scheduled_spec_decode_tokens:
            self._step = self._stage(scheduler_output, num_scheduled_tokens, np.asarray(prepared[1].num_draft_tokens))
            self._move_positions(self._step)
        else:
            self._follow(plain_plan(num_scheduled_tokens, self._flat_rows))
        if self.greedy_head is not None:
            self.greedy_head.expect(
                self.speculative_config.specplug.verification == "exact"
                and not scheduler_output.has_structured_output_requests
                and is_argmax(self.input_batch.sampling_metadata)
            )
        return prepared

    def _stage(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray, num_drafts: np.ndarray) -> Step:
        parents = np.tile(np.arange(-1, int(num_drafts.max())), (len(num_drafts), 1))  # chains, unless known
        drafts: list[FlatDraft | None] = [None] * len(num_drafts)
        for index, req_id in enumerate(self.input_batch.req_ids):
            if num_drafts[index]:
                drafts[index] = self._fill_parents(parents[index], req_id, scheduler_output)
        context_lens = self.input_batch.num_computed_tokens_cpu_tensor[: len(num_drafts)]
        sizes = num_scheduled_tokens, num_drafts
        step = stage(self.input_ids.cpu, *sizes, parents, drafts, context_lens, self._kept_rows)
        return self.with_states(step, step.tree.parents)

    def with_states(self, step: Step, parents: torch.Tensor) -> Step:
        """Add the rows of layers with states, if the target has any: int64 ``[num_reqs, width]``."""
        if not self.state_layers.layers:
            return step
        scheduled, context_lens = self._scheduled, self.input_batch.num_computed_tokens_cpu_tensor
        return replace(step, states=state_rows(parents, step.tree.num_rows, step.row_start, scheduled, context_lens))

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        is_rounded = self.model_config.enforce_eager and self.dtype != torch.float32
        with PlaceFree() if is_rounded else nullcontext():
            return super()._model_forward(*args, **kwargs)

    def _move_positions(self, step: Step) -> None:
        """Rewrite the positions of tree rows; vLLM has derived their cache slots from the flat ones."""
        if step.rows is not None:
            self.positions[step.rows.commit_rows] = step.positions
            if self.uses_mrope:
                self._move_rope_positions(self.mrope_positions.gpu, step)

    @staticmethod
    def _move_rope_positions(positions: torch.Tensor, step: Step) -> None:
        """Move M-RoPE positions as far as the plain ones: after a prompt, all components advance alike."""
        positions[:, step.rows.commit_rows] += step.moves

    def _calc_mrope_positions(self, scheduler_output: Any) -> None:
        super()._calc_mrope_positions(scheduler_output)
        # vLLM computes them again, and copies them, after it has pruned a video.
        if self._step is not None and self._step.rows is not None:
            self._move_rope_positions(self.mrope_positions.cpu, self._step)

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        attn_metadata, common = super()._build_attention_metadata(*args, **kwargs)
        if self._step is not None and isinstance(attn_metadata, dict):
            verify(self._step, attn_metadata, self.drafter.draft_layers)
            self._attn_metadata = attn_metadata
        return attn_metadata, common

    # ---- after the forward

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Profile the sampler without vLLM's rejection sampler: no tree meets it, and on a CPU vLLM 0.30's fails."""
        with attributes(self, speculative_config=None):
            return super()._dummy_sampler_run(hidden_states)

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        return self._sample_plainly(logits) if self._step is None else self._walk(self._step, logits)

    def _walk(self, step: Step, logits: torch.Tensor) -> Any:
        batch = self.input_batch
        active = ~self.discard_request_mask.np[: batch.num_reqs]
        walker = self._walker(step, batch.num_reqs)
        walked, output = walk(step, logits, walker, active)
        if type(walker) is SampledWalk and walker.drawn:  # others do not draw once per token
            self._drawn_states.walked(batch.req_ids, walker.drawn)
        plan = commit(step, walked, self.alike_layers, batch.block_table)
        if step.states is not None:
            self.state_layers.commit(self._attn_metadata, plan, batch.block_table)
            self._note_state_blocks(step, walked)
        self._follow(plan)
        self._walked(step.tree, walked, active)
        self._step = None
        return output

    def _note_state_blocks(self, step: Step, walked: Walk) -> None:
        """Tell vLLM in which blocks the states are now, where it keeps one per block for later prompts."""
        for request in step.states.requests.tolist():
            req_id = self.input_batch.req_ids[request]
            if req_id in self.mamba_state_idx:
                first, size = self.mamba_state_idx[req_id], self.cache_config.mamba_block_size
                last = int(self.input_batch.num_computed_tokens_cpu[request]) + int(walked.num_emitted[request]) - 1
                self.mamba_state_idx[req_id] = max(first, last // size)

    def _get_mamba_bufs(self) -> Any:
        """Without drafts: a state is where plain decoding has it."""
        with attributes(self, speculative_config=None):
            return super()._get_mamba_bufs()

    def _update_states_after_model_execute(self, *_: Any) -> None:
        """Nothing: the commit has brought the states to the accepted tokens."""

    def greedy_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits as a greedy step computes them: ``[num_rows, hidden_size]`` -> ``[num_rows, vocab_size]``."""
        if self.greedy_head is not None:
            self.greedy_head.expect(True)
        return self.model.compute_logits(hidden)

    def _follow(self, plan: StepPlan) -> None:
        """Keep the rows that the drafter reads next."""
        self._plan = plan
        self.drafter.follow(plan)

    def _sample_plainly(self, logits: torch.Tensor) -> Any:
        """Sample one token per request; a request in the middle of its prefill does not draw noise."""
        if is_argmax(self.input_batch.sampling_metadata) and walks_greedily(logits):
            return SamplerOutput(greedy_tokens(logits), None)
        metadata = replace(self.input_batch.sampling_metadata, spec_token_ids=None)
        discarded = self.discard_request_mask.np[: self.input_batch.num_reqs]
        if metadata.generators and discarded.any():
            drawing = {i: generator for i, generator in metadata.generators.items() if not discarded[i]}
            metadata = replace(metadata, generators=drawing)
        return self.sampler(logits=logits, sampling_metadata=metadata)

    def _walker(self, step: Step, num_reqs: int) -> SampledWalk:
        batch, options = self.input_batch, self.speculative_config.specplug
        metadata = batch.sampling_metadata
        if self.samples_drafts:
            metadata = replace(metadata, generators=self.draft_noise.generators())
        arguments = (self.sampler, metadata, batch.req_output_token_ids[:num_reqs])
        # Custom processors change what only the exact walk evaluates.
        if options.verification == "exact" or self._has_custom_processors:
            return SampledWalk(*arguments)
        if options.verification == "rejection":
            return RejectionWalk(*arguments, drafts=step.drafts)
        requests = [self.requests[req_id] for req_id in batch.req_ids]
        return TypicalWalk(*arguments, limits=[limits_of(request.sampling_params, options) for request in requests])

    def _bookkeeping_sync(self, scheduler_output: Any, sampler_output: Any, *args: Any, **kwargs: Any) -> Any:
        # vLLM winds back the generators of requests whose sample it discards.  The walk has not drawn from them, and a
        # CPU generator cannot be wound back.
        generators = self.input_batch.generators
        undrawn = {
            int(index): generators.pop(int(index))
            for index in np.flatnonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])
            if int(index) in generators
        }
        try:
            return super()._bookkeeping_sync(scheduler_output, sampler_output, *args, **kwargs)
        finally:
            generators.update(undrawn)
