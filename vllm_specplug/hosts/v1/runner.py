"""The V1 model runner with trees: stage -> (host's forward) -> walk -> commit -> re-seed and draft.

Trees, walks and drafts are host values here, on every device: this runner knows each step's tokens before the next one.
What attention is told, and how accepted rows are moved, is the device's: ``v1_cpu_runner``, ``v1_gpu_runner``.
"""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.outputs import SamplerOutput

from vllm_specplug.budget.budget import PLAIN
from vllm_specplug.config import model_drafter
from vllm_specplug.core.guard import Guard
from vllm_specplug.core.kv import KvScratch, plan_moves
from vllm_specplug.core.layout import lay_out
from vllm_specplug.core.loops.warm_up import compile_loops
from vllm_specplug.core.request_args import wants_speculation
from vllm_specplug.core.seed import last_rows
from vllm_specplug.core.tree import from_flat
from vllm_specplug.hosts.drafters.base import CustomDrafter
from vllm_specplug.hosts.drafters.draft_noise import DraftNoise
from vllm_specplug.hosts.drafters.eagle_v1 import TreeEagleProposer
from vllm_specplug.hosts.drafters.flat_draft import FlatDraft, flatten
from vllm_specplug.hosts.drafters.free_proposer import ModelFreeDrafting, context_of
from vllm_specplug.hosts.drafters.medusa_v1 import MedusaProposer
from vllm_specplug.hosts.v1.budgeting import ServingBudget
from vllm_specplug.hosts.v1.processors import custom_processors_hidden, restore_processors, restore_thinking_budget
from vllm_specplug.hosts.v1.rejection_walk import RejectionWalk
from vllm_specplug.hosts.v1.sampled_walk import SampledWalk, is_argmax
from vllm_specplug.hosts.v1.scheduler import TreeDraftTokenIds, TreeSchedulerOutput, attach_drafts
from vllm_specplug.hosts.v1.trace import TreeTrace
from vllm_specplug.hosts.v1.typical_walk import TypicalWalk, limits_of
from vllm_specplug.kernels import greedy_walk
from vllm_specplug.types import PADDING, Draft, KvMoves, TokenTree, Walk
from vllm_specplug.utils.frames import with_room
from vllm_specplug.utils.metrics import Counters


@dataclass(frozen=True)
class StagedStep:
    """The trees of one verification forward.

    Attributes:
        tree: trees of all requests, in batch order; a request without drafts is a root.
        row_start: int64 ``[num_reqs]``; flat row of each root in the forward.
        logits_start: int64 ``[num_reqs]``; row of each root in the logits.
        masked: list of the batch indices whose rows attend by the tree mask.
        rows: the attention's view of the masked requests (the device's type), or None where there are none.
        drafts: of each request, what was drafted where all of it is verified, else None.
    """

    tree: TokenTree
    row_start: torch.Tensor
    logits_start: torch.Tensor
    masked: list[int]
    rows: Any
    drafts: list[FlatDraft | None]


class TreeModelRunner(ABC):
    """Mixed into a V1 runner of the host, whose drafts then are trees."""

    drafter: TreeEagleProposer | CustomDrafter
    #: Whether drafts may be coupled with the sampler's noise.
    may_couple = True

    def __init__(self, vllm_config: Any, device: torch.device):
        compile_loops()
        with custom_processors_hidden(vllm_config.model_config):
            super().__init__(vllm_config, device)
        options = self.speculative_config.specplug
        if self.speculative_config.use_eagle():
            self.drafter = TreeEagleProposer(vllm_config, device, self, model_drafter(options))
        self.drafter.runner = self
        self._model_free = ModelFreeDrafting.of(options, self.model_config.get_vocab_size())
        self._draft_guard = Guard(options.method)
        # Every rank does the same; one of them tells.
        tells = get_tensor_model_parallel_rank() == 0
        self._counters = Counters(self.speculative_config.metrics_file if tells else None)
        self._verify_start = 0.0
        self._trace = TreeTrace.open(options.trace_trees if tells else None)
        #: What was drafted last, by request: a request that is not scheduled keeps its drafts.
        self._drafts: dict[str, FlatDraft] = {}
        self._step: StagedStep | None = None
        #: int64 ``[num_reqs]``: flat row of the last forward whose logits gave each request's newest token.
        self._last_rows: torch.Tensor | None = None
        self._flat_rows = torch.arange(self.max_num_tokens)
        self._layers: dict[str, Any] | None = None
        self._has_custom_processors = restore_processors(self)
        self.draft_noise = DraftNoise(self, options, self._has_custom_processors)
        self.serving_budget = ServingBudget.of(self, options)
        if isinstance(self.drafter, TreeEagleProposer):
            self.drafter.budget = self.serving_budget

    def may_reinitialize_input_batch(self, *args: Any, **kwargs: Any) -> None:
        super().may_reinitialize_input_batch(*args, **kwargs)
        restore_thinking_budget(self)

    # ---- the measured budget

    def prepare_budget(self) -> None:
        """At the end of the start-up: steps are timed, unless that was done before."""
        if self.serving_budget is not None:
            self.serving_budget.prepare()

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self.serving_budget is not None:
            self.serving_budget.begin(scheduler_output)
        output = with_room(super().execute_model, scheduler_output, *args, **kwargs)
        if self.serving_budget is not None:
            self.serving_budget.forward_ends()
        return output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = with_room(super().sample_tokens, *args, **kwargs)
        if self.serving_budget is not None:
            self.serving_budget.end()
        return attach_drafts(output, self.take_draft_token_ids())

    # ---- before the forward

    def _update_states(self, scheduler_output: Any) -> Any:
        for req_id in scheduler_output.finished_req_ids:
            self._drafts.pop(req_id, None)
        self.draft_noise.finish(scheduler_output.finished_req_ids)
        self.drafter.finish(scheduler_output.finished_req_ids)
        if self._model_free is not None:
            self._model_free.finish(scheduler_output.finished_req_ids)
        if self.serving_budget is not None:
            self.serving_budget.budget.finish(scheduler_output.finished_req_ids)
        return super()._update_states(scheduler_output)

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        self._verify_start = time.perf_counter()
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        self._step = None
        if scheduler_output.scheduled_spec_decode_tokens:
            begin = time.perf_counter()
            self._step = self._stage(scheduler_output, num_scheduled_tokens, prepared[1])
            if self.serving_budget is not None:
                self.serving_budget.staged(time.perf_counter() - begin)
        else:  # a plain step: the host's attention, sampler and cost
            self._last_rows = torch.from_numpy(np.cumsum(num_scheduled_tokens) - 1)
        return prepared

    def _stage(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray, spec_decode_metadata: Any) -> StagedStep:
        num_drafts = np.asarray(spec_decode_metadata.num_draft_tokens)
        num_rows = num_drafts + 1
        last = np.cumsum(num_scheduled_tokens)
        row_start = last - num_rows
        width = int(num_rows.max())
        parents = np.tile(np.arange(-1, width - 1), (len(num_drafts), 1))  # chains, unless we know better
        drafts: list[FlatDraft | None] = [None] * len(num_drafts)
        for index, req_id in enumerate(self.input_batch.req_ids):
            if num_drafts[index]:
                drafts[index] = self._fill_parents(parents[index], req_id, scheduler_output)
        flat_rows = np.minimum(row_start[:, None] + np.arange(width), last[-1] - 1)
        # The host clamps its -1 placeholders in input_ids only at the forward: here they still match nothing.
        token_ids = self.input_ids.cpu[torch.from_numpy(flat_rows)]
        tree = from_flat(token_ids, torch.from_numpy(parents), torch.from_numpy(num_rows))
        is_masked = num_scheduled_tokens == num_rows
        masked = np.flatnonzero(is_masked).tolist()
        rows = self._lay_out(tree, row_start, num_rows, is_masked, masked, int(last[-1])) if masked else None
        logits_start = np.cumsum(num_rows) - num_rows
        return StagedStep(tree, torch.from_numpy(row_start), torch.from_numpy(logits_start), masked, rows, drafts)

    def _fill_parents(self, row: np.ndarray, req_id: str, scheduler_output: Any) -> FlatDraft | None:
        """Any prefix of a parent-first list is a tree, so a truncated draft keeps its parents.

        Returns:
            The draft, if all of it was scheduled.
        """
        draft_token_ids = scheduler_output.scheduled_spec_decode_tokens[req_id]
        count = len(draft_token_ids)
        known = self._drafts.get(req_id)
        if isinstance(scheduler_output, TreeSchedulerOutput) and req_id in scheduler_output.parents:
            row[1 : count + 1] = scheduler_output.parents[req_id]
        elif known is not None and known.token_ids[:count] == list(draft_token_ids):
            row[1 : count + 1] = known.parents[:count]
            return known if count == len(known.token_ids) else None
        return None

    def _lay_out(
        self,
        tree: TokenTree,
        row_start: np.ndarray,
        num_rows: np.ndarray,
        is_masked: np.ndarray,
        masked: list[int],
        num_tokens: int,
    ) -> Any:
        """Rewrite the positions of tree rows (their slots were derived from the flat ones) and build the mask."""
        num_reqs, width = tree.parents.shape
        context_lens = self.input_batch.num_computed_tokens_cpu_tensor[:num_reqs]
        layout = lay_out(tree, context_lens, int(tree.depths.max()))
        valid = (np.arange(width) < num_rows[:, None]) & is_masked[:, None]
        flat_rows = torch.from_numpy((row_start[:, None] + np.arange(width))[valid])
        positions = torch.from_numpy(layout.positions.numpy()[valid])
        self.positions[flat_rows.to(self.positions.device)] = positions.to(self.positions.device)
        start, lens = torch.from_numpy(row_start.astype(np.int32)), torch.from_numpy(num_rows.astype(np.int32))
        return self._tree_rows(
            context_lens.to(torch.int32), start, lens, layout.mask, masked, flat_rows, flat_rows.numel() == num_tokens
        )

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
        """What attention is told of a forward with trees.

        Args:
            context_lens: int32 ``[num_reqs]``, as the other tensors on the host; cached tokens that every row sees.
            start, lens: int32 ``[num_reqs]``; the tree's rows in the flat batch.
            mask: bool ``[num_reqs, width, width]``.
            masked: requests whose rows attend by it.
            flat_rows: int64 ``[num_rows]``; their flat rows.
            all_rows: whether the forward has no others.
        """

    @staticmethod
    @abstractmethod
    def scratch_metadata(
        block_table: torch.Tensor,
        context_lens: torch.Tensor,
        width: int,
        tree_start: torch.Tensor,
        mask: torch.Tensor,
        scratch: dict[str, KvScratch],
    ) -> Any:
        """Metadata of a drafting forward, see ``attention.scratch_metadata``."""

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
        if self.serving_budget is not None:
            self.serving_budget.forward_begins()
        return attn_metadata, common

    # ---- after the forward

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        begin = time.perf_counter()
        output = self._choose(logits)
        if self.serving_budget is not None:
            self.serving_budget.sampled(time.perf_counter() - begin)
        return output

    def _choose(self, logits: torch.Tensor | None) -> Any:
        step = self._step
        if step is None:
            return self._sample_plainly(logits)
        num_reqs = self.input_batch.num_reqs
        active = torch.from_numpy(~self.discard_request_mask.np[:num_reqs])
        walk_trees = self._walker(step, num_reqs)
        walk, output = walk_trees(step.tree, logits, step.logits_start, active)
        moves = plan_moves(walk, step.row_start)
        self._commit(step, walk, moves)
        path_rows = self._flat_rows.clone()
        path_rows[moves.target_rows] = moves.source_rows
        self.drafter.path_rows = path_rows.to(self.device)
        if isinstance(self.drafter, MedusaProposer):
            self._last_rows = last_rows(walk, step.row_start)
        if self._trace is not None:
            self._trace.write(self.input_batch.req_ids, step.tree, walk, self._drafts)
        self._step = None
        self._count(step)
        return output

    def _count(self, step: StagedStep) -> None:
        if int(step.tree.num_rows.max()) > 1:
            self._counters.add("steps")
            self._counters.add("verify_seconds", time.perf_counter() - self._verify_start)
            if self.input_batch.sampling_metadata.max_num_logprobs == -1:
                self._counters.add("logprobs of the whole vocabulary", int((step.tree.num_rows > 1).sum()))

    def _sample_plainly(self, logits: torch.Tensor) -> Any:
        """One token per request; those whose token is thrown away (in their prefill) do not draw."""
        self.drafter.path_rows = self._flat_rows.to(self.device)
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
        metadata = replace(batch.sampling_metadata, generators=self.draft_noise.generators())
        arguments = (self.sampler, metadata, batch.req_output_token_ids[:num_reqs])
        # The others know temperature, top_k and top_p only.
        if options.verification == "exact" or self._has_custom_processors:
            return SampledWalk(*arguments)
        if options.verification == "rejection":
            return RejectionWalk(*arguments, drafts=step.drafts)
        requests = [self.requests[req_id] for req_id in batch.req_ids]
        return TypicalWalk(*arguments, limits=[limits_of(request.sampling_params, options) for request in requests])

    @abstractmethod
    def _commit(self, step: StagedStep, walk: Walk, moves: KvMoves) -> None:
        """Bring the accepted rows' key/value behind the context, in all layers of the target."""

    def _target_layers(self) -> dict[str, Any]:
        if self._layers is None:
            layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)
            self._layers = {name: layer for name, layer in layers.items() if name not in self.drafter.draft_layers}
        return self._layers

    def _bookkeeping_sync(self, scheduler_output: Any, sampler_output: Any, *args: Any, **kwargs: Any) -> Any:
        # The host winds back the generators of requests whose sample it discards (and a CPU generator
        # cannot be wound back): the walk has not drawn from them.
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

    # ---- drafting

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        # The host asks this of the longest request for the whole batch.  Our levels write no pages, and
        # the scheduler cuts each request's drafts at max_model_len.
        return common_attn_metadata is not None

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: Any,
        sampling_metadata: Any,
        hidden_states: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> list[list[int]]:
        wanted = ~self.discard_request_mask.np[: self.input_batch.num_reqs]
        wanted &= [self._speculates(req_id) for req_id in self.input_batch.req_ids]
        arm = None if self.serving_budget is None else self.serving_budget.plan(wanted)
        if isinstance(self.drafter, MedusaProposer):
            # The host hands hidden states to drafters of its own only.
            self.drafter.hidden = hidden_states[self._last_rows]
        self.drafter.begin_round(wanted)
        propose_by_model = functools.partial(
            super().propose_draft_token_ids,
            scheduler_output,
            sampled_token_ids,
            sampling_metadata,
            hidden_states,
            *args,
            **kwargs,
        )
        failures = Guard.total_failures
        runs = caught_up = False

        def draft_by_model(expected: torch.Tensor | None = None) -> Draft | None:
            nonlocal runs, caught_up
            budget = self.serving_budget
            if budget is not None and not (arm.host and budget.wants_model_drafter(expected)):
                return None
            runs = True
            if isinstance(self.drafter, TreeEagleProposer) and self.drafter.missed.num_rows:
                caught_up = True
                catch_up = functools.partial(self._draft_guard.run, self.drafter.catch_up)
                catch_up() if budget is None else budget.catch_up(catch_up)
            return propose_by_model() if budget is None else budget.timed(propose_by_model)

        with self._counters.timed("draft_seconds"):
            if arm is PLAIN:
                draft = None
            else:
                propose = functools.partial(self._propose, wanted, draft_by_model)
                draft = propose() if self.serving_budget is None else self.serving_budget.propose(propose)
            if isinstance(self.drafter, TreeEagleProposer) and not runs:
                self._skip_round(sampled_token_ids, hidden_states, *args, **kwargs)
            if self.serving_budget is not None:
                draft = self.serving_budget.select(draft, wanted)
        self._counters.add("proposer failed", Guard.total_failures - failures)
        if isinstance(self.drafter, TreeEagleProposer) and draft is not None:
            unread = self.drafter.missed.unread.intersection(self.input_batch.req_ids)
            self._counters.add("not read by the drafter", len(unread))
        flat = self._remember(draft)
        if self.serving_budget is not None:
            self.serving_budget.handed_over(caught_up)
        self._draft_guard.run(functools.partial(self.drafter.end_round, self._verify_start))
        if self.serving_budget is not None:
            self.serving_budget.end_round()
        return flat

    def _propose(self, wanted: np.ndarray, draft_by_model: Callable[..., Draft | None]) -> Draft | None:
        if self._model_free is not None:
            return self._model_free.propose(self.input_batch, wanted, draft_by_model)
        context = context_of(self.input_batch, wanted, self.model_config.get_vocab_size())
        return self._draft_guard.check(draft_by_model, context)

    def _skip_round(
        self,
        sampled_token_ids: list[list[int]],
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        spec_decode_metadata: Any,
        *_: Any,
    ) -> None:
        if self.use_aux_hidden_state_outputs:
            hidden_states = torch.cat(aux_hidden_states, dim=-1)
        # Until 0.31 the host has no such metadata in a step without drafts.
        plain = spec_decode_metadata is None
        num_drafts = [0] * len(sampled_token_ids) if plain else spec_decode_metadata.num_draft_tokens
        self.drafter.skip_round(hidden_states, sampled_token_ids, np.asarray(num_drafts))

    def _remember(self, draft: Draft | None) -> list[list[int]]:
        """Keep the drafts by request and hand the flat tokens to the scheduler."""
        req_ids = self.input_batch.req_ids
        if draft is None:
            for req_id in req_ids:
                self._drafts.pop(req_id, None)
            return [[] for _ in req_ids]
        flat = flatten(draft, self.draft_noise.rejected(len(req_ids)))
        for index, req_id in enumerate(req_ids):
            if not self._speculates(req_id):
                self._counters.add("turned off by the request")
                flat[index] = FlatDraft([], [], [])
            self._drafts[req_id] = flat[index]
        return [list(one.token_ids) for one in flat]  # the scheduler cuts its lists in place

    def take_draft_token_ids(self) -> TreeDraftTokenIds | None:
        taken = super().take_draft_token_ids()
        if taken is None:
            return None
        parents = [self._drafts[req_id].parents if req_id in self._drafts else [] for req_id in taken.req_ids]
        return TreeDraftTokenIds(taken.req_ids, taken.draft_token_ids, parents)

    def _speculates(self, req_id: str) -> bool:
        params = self.requests[req_id].sampling_params
        return params is None or wants_speculation(params.extra_args)


__all__ = ["PADDING", "StagedStep", "TreeModelRunner"]
