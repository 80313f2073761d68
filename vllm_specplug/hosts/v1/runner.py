"""The V1 model runner with trees: stage -> (vLLM's forward) -> walk -> commit -> draft phase, see ``core/step.py``.

Trees, walks and drafts are values in CPU memory here, on every device: this runner knows each step's tokens before the
next step.  Attention's inputs and the commit depend on the device: ``cpu_runner``, ``gpu_runner``.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.outputs import SamplerOutput

from vllm_specplug.core.kv import KvScratch
from vllm_specplug.core.layout import lay_out
from vllm_specplug.core.loops.warm_up import compile_loops
from vllm_specplug.core.step import StepPlan, after_forward, before_forward
from vllm_specplug.core.tree import from_flat
from vllm_specplug.hosts.drafters.flat_draft import FlatDraft
from vllm_specplug.hosts.kv_groups import alike_layers
from vllm_specplug.hosts.plain_sampling import limits_of
from vllm_specplug.hosts.ranks import leads
from vllm_specplug.hosts.trace import TreeTrace
from vllm_specplug.hosts.v1.draft_phase import DraftPhase
from vllm_specplug.hosts.v1.processors import custom_processors_hidden, restore_processors, restore_thinking_budget
from vllm_specplug.hosts.v1.rejection_walk import RejectionWalk
from vllm_specplug.hosts.v1.reloading import Reloading
from vllm_specplug.hosts.v1.sampled_walk import SampledWalk, is_argmax
from vllm_specplug.hosts.v1.scheduler import attach_drafts
from vllm_specplug.hosts.v1.typical_walk import TypicalWalk
from vllm_specplug.kernels import greedy_walk
from vllm_specplug.types import TokenTree
from vllm_specplug.utils.frames import with_room
from vllm_specplug.utils.metrics import Counters
from vllm_specplug.utils.processes import ChildProgram


@dataclass
class StagedStep:
    """The trees of one verification forward.

    Attributes:
        tree: trees of all requests, in batch order; a request without drafts is a root.
        row_start: int64 ``[num_reqs]``; flat row of each root in the forward.
        logits_start: int64 ``[num_reqs]``; row of each root in the logits.
        is_masked: bool ``[num_reqs]``; requests whose rows attend by the tree mask.
        num_tokens: flat rows of the forward.
        drafts: each request's draft if all of it is verified, else None.
        moves: of an M-RoPE target, int64 ``[num_rows]`` each: flat rows, and their tree positions less the flat ones.
        rows: what attention needs to know of the masked requests (the device's type); None if there are none.
    """

    tree: TokenTree
    row_start: torch.Tensor
    logits_start: torch.Tensor
    is_masked: np.ndarray
    num_tokens: int
    drafts: list[FlatDraft | None]
    moves: tuple[torch.Tensor, torch.Tensor] | None = None
    rows: Any = None


class TreeModelRunner(DraftPhase, ABC):
    """Mixed into a V1 runner of vLLM, whose drafts then are trees; implements ``core.step.StepRunner``."""

    #: Whether drafts may be coupled with the sampler's noise.
    may_couple = True

    def __init__(self, vllm_config: Any, device: torch.device):
        compile_loops()
        with custom_processors_hidden(vllm_config.model_config):
            super().__init__(vllm_config, device)
        options = self.speculative_config.specplug
        # Every tensor-parallel rank does the same; one of them counts and traces.
        reports = leads()
        self._counters = Counters(
            self.speculative_config.metrics_file if reports else None, vllm_config.parallel_config.data_parallel_index
        )
        self._verify_start = 0.0
        self._trace = TreeTrace(options.trace_trees if reports else None)
        self._step: StagedStep | None = None
        self._flat_rows = torch.arange(self.max_num_tokens)
        self.reloading: Reloading | None = None
        self.trainer: ChildProgram | None = None
        self._has_custom_processors = restore_processors(self)
        self._init_drafting(vllm_config, device, self._has_custom_processors)

    def may_reinitialize_input_batch(self, *args: Any, **kwargs: Any) -> None:
        super().may_reinitialize_input_batch(*args, **kwargs)
        restore_thinking_budget(self)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)
        layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)
        target = {name: layer for name, layer in layers.items() if name not in self.drafter.draft_layers}
        #: The target's layers, for the commit.
        self.alike_layers = alike_layers(self.kv_cache_config, target)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self.reloading is not None:
            self.reloading.before_step()
        self._begin_step(scheduler_output)
        return with_room(super().execute_model, scheduler_output, *args, **kwargs)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = with_room(super().sample_tokens, *args, **kwargs)
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
        self._finish_requests(scheduler_output.finished_req_ids)
        return super()._update_states(scheduler_output)

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        self._verify_start = time.perf_counter()
        self._step = None
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        if scheduler_output.scheduled_spec_decode_tokens:
            self._step = self._stage(scheduler_output, num_scheduled_tokens, prepared[1])
            self._step.rows = before_forward(self, self._step)
        else:  # a plain step: vLLM's attention, sampler and cost
            last = torch.from_numpy(np.cumsum(num_scheduled_tokens) - 1)
            self.follow(StepPlan(last.unsqueeze(1), last.unsqueeze(1), self._flat_rows, last))
        return prepared

    def _stage(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray, spec_decode_metadata: Any) -> StagedStep:
        num_drafts = np.asarray(spec_decode_metadata.num_draft_tokens)
        num_rows = num_drafts + 1
        last = np.cumsum(num_scheduled_tokens)
        row_start = last - num_rows
        width = int(num_rows.max())
        parents = np.tile(np.arange(-1, width - 1), (len(num_drafts), 1))  # chains, unless the draft is known
        drafts: list[FlatDraft | None] = [None] * len(num_drafts)
        for index, req_id in enumerate(self.input_batch.req_ids):
            if num_drafts[index]:
                drafts[index] = self._fill_parents(parents[index], req_id, scheduler_output)
        flat_rows = np.minimum(row_start[:, None] + np.arange(width), last[-1] - 1)
        # vLLM clamps its -1 placeholders in input_ids only at the forward: here they still match nothing.
        token_ids = self.input_ids.cpu[torch.from_numpy(flat_rows)]
        return StagedStep(
            tree=from_flat(token_ids, torch.from_numpy(parents), torch.from_numpy(num_rows)),
            row_start=torch.from_numpy(row_start),
            logits_start=torch.from_numpy(np.cumsum(num_rows) - num_rows),
            is_masked=num_scheduled_tokens == num_rows,
            num_tokens=int(last[-1]),
            drafts=drafts,
        )

    def lay_out_trees(self, step: StagedStep) -> Any | None:
        """Rewrite the positions of tree rows (their slots were derived from the flat ones) and build the masks."""
        masked = np.flatnonzero(step.is_masked).tolist()
        if not masked:
            return None
        tree, row_start, num_rows = step.tree, step.row_start.numpy(), step.tree.num_rows.numpy()
        num_reqs, width = tree.parents.shape
        context_lens = self.input_batch.num_computed_tokens_cpu_tensor[:num_reqs]
        layout = lay_out(tree, context_lens, int(tree.depths.numpy().max()))
        valid = (np.arange(width) < num_rows[:, None]) & step.is_masked[:, None]
        flat_rows = torch.from_numpy((row_start[:, None] + np.arange(width))[valid])
        positions = torch.from_numpy(layout.positions.numpy()[valid])
        self.positions[flat_rows.to(self.positions.device)] = positions.to(self.positions.device)
        if self.uses_mrope:
            moves = torch.from_numpy((tree.depths.numpy() - np.arange(width))[valid])
            step.moves = flat_rows, moves
            self._move_rope_positions(self.mrope_positions.gpu, step)
        start, lens = torch.from_numpy(row_start.astype(np.int32)), torch.from_numpy(num_rows.astype(np.int32))
        all_rows = flat_rows.numel() == step.num_tokens
        return self._tree_rows(context_lens.to(torch.int32), start, lens, layout.mask, masked, flat_rows, all_rows)

    @staticmethod
    def _move_rope_positions(positions: torch.Tensor, step: StagedStep) -> None:
        """Move M-RoPE positions as far as the plain ones: behind a prompt, all components advance alike."""
        if step.moves is not None:
            rows, moves = (values.to(positions.device) for values in step.moves)
            positions[:, rows] += moves

    def _calc_mrope_positions(self, scheduler_output: Any) -> None:
        super()._calc_mrope_positions(scheduler_output)
        if self._step is not None:  # vLLM computes them again, and copies them, after it has pruned a video
            self._move_rope_positions(self.mrope_positions.cpu, self._step)

    @abstractmethod
    def _tree_rows(
        self,
        context_lens: torch.Tensor,
        start: torch.Tensor,
        lens: torch.Tensor,
        mask: torch.Tensor,
        masked: list[int],
        flat_rows: torch.Tensor,
        all_rows: bool,
    ) -> Any:
        """Return what attention needs to know of a forward with trees.

        Args:
            context_lens: int32 ``[num_reqs]``, in CPU memory as the other tensors; cached tokens that every row sees.
            start, lens: int32 ``[num_reqs]``; the tree's rows in the flat batch.
            mask: bool ``[num_reqs, width, width]``.
            masked: requests whose rows attend by it.
            flat_rows: int64 ``[num_rows]``; their flat rows.
            all_rows: whether the forward has no others.
        """

    @staticmethod
    @abstractmethod
    def level_metadata(
        block_table: torch.Tensor,
        context_lens: torch.Tensor,
        tree_start: torch.Tensor,
        mask: torch.Tensor,
        scratch: dict[str, KvScratch],
    ) -> Any:
        """Return the metadata of a draft level, see ``attention.cpu.level_metadata``."""

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        attn_metadata, common = super()._build_attention_metadata(*args, **kwargs)
        if self._step is not None and self._step.rows is not None and isinstance(attn_metadata, dict):
            with_trees: dict[int, Any] = {}  # layers share their metadata
            for layer_name, metadata in attn_metadata.items():
                if layer_name in self.drafter.draft_layers:
                    continue
                if id(metadata) not in with_trees:
                    with_trees[id(metadata)] = replace(metadata, tree=self._step.rows)
                attn_metadata[layer_name] = with_trees[id(metadata)]
        return attn_metadata, common

    # ---- after the forward

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Profile the sampler without vLLM's rejection sampler: no tree meets it, and on a CPU vLLM 0.30's fails."""
        config, self.speculative_config = self.speculative_config, None
        try:
            return super()._dummy_sampler_run(hidden_states)
        finally:
            self.speculative_config = config

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        return self._sample_plainly(logits) if self._step is None else self._walk(self._step, logits)

    def _walk(self, step: StagedStep, logits: torch.Tensor) -> Any:
        num_reqs = self.input_batch.num_reqs
        active = ~self.discard_request_mask.np[:num_reqs]
        walk, output = self._walker(step, num_reqs)(step.tree, logits, step.logits_start, torch.from_numpy(active))
        after_forward(self, walk, step.row_start, step.num_tokens)
        self._walked(step.tree, walk, active)
        self._step = None
        return output

    def greedy_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits as a greedy step computes them: ``[num_rows, hidden_size]`` -> ``[num_rows, vocab_size]``."""
        return self.model.compute_logits(hidden)

    def follow(self, plan: StepPlan) -> None:
        """Give the drafter the rows that it reads next."""
        self._plan = plan
        self.drafter.follow(plan)

    def _sample_plainly(self, logits: torch.Tensor) -> Any:
        """Sample one token per request; a request in the middle of its prefill does not draw noise."""
        if is_argmax(self.input_batch.sampling_metadata) and greedy_walk.is_available(logits):
            return SamplerOutput(greedy_walk.greedy_tokens(logits), None)
        metadata = replace(self.input_batch.sampling_metadata, spec_token_ids=None)
        discarded = self.discard_request_mask.np[: self.input_batch.num_reqs]
        if metadata.generators and discarded.any():
            drawing = {i: generator for i, generator in metadata.generators.items() if not discarded[i]}
            metadata = replace(metadata, generators=drawing)
        return self.sampler(logits=logits, sampling_metadata=metadata)

    def _walker(self, step: StagedStep, num_reqs: int) -> SampledWalk:
        batch, options = self.input_batch, self.speculative_config.specplug
        metadata, generators = batch.sampling_metadata, self.draft_noise.generators()
        if generators is not metadata.generators:
            metadata = replace(metadata, generators=generators)
        arguments = (self.sampler, metadata, batch.req_output_token_ids[:num_reqs])
        # Custom processors change what only the exact walk evaluates.
        if options.verification == "exact" or self._has_custom_processors:
            return SampledWalk(*arguments)
        if options.verification == "rejection":
            return RejectionWalk(*arguments, drafts=step.drafts)
        requests = [self.requests[req_id] for req_id in batch.req_ids]
        return TypicalWalk(*arguments, limits=[limits_of(request.sampling_params, options) for request in requests])

    @abstractmethod
    def commit(self, plan: StepPlan) -> None:
        """Bring the accepted rows' key/value behind the context, in all layers of the target."""

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
