"""The draft phase of the V1 runner, after each step: plan, catch up, draft, select, keep the trees, record."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vllm_specplug.budget.choose import EVERYTHING, StepRecord
from vllm_specplug.budget.planner import PLAIN
from vllm_specplug.core.guard import Guard
from vllm_specplug.core.request_args import wants_speculation
from vllm_specplug.cpu.budget import ServingBudget
from vllm_specplug.cpu.drafters.base import make_v1_drafter
from vllm_specplug.cpu.drafters.draft_noise import DraftNoise
from vllm_specplug.cpu.drafters.flat_draft import DrawnFrom, FlatDraft
from vllm_specplug.cpu.drafters.model_free import make_drafting
from vllm_specplug.cpu.recording import Recorder, make_recorder
from vllm_specplug.cpu.reloading import Reloading
from vllm_specplug.cpu.scheduler import TreeSchedulerOutput
from vllm_specplug.types import Draft, TokenTree, Walk
from vllm_specplug.utils.metrics import Counters
from vllm_specplug.vllm.draft_watch import StepWatch
from vllm_specplug.vllm.grammars import TreeDraftTokenIds
from vllm_specplug.vllm.ranks import leads
from vllm_specplug.vllm.trace import TreeTrace


@dataclass(frozen=True)
class AcceptedRows:
    """The accepted rows of all requests of a step, prompt rows included.

    Attributes:
        counts: int ``[num_reqs]``; rows of each request.
        first: int ``[num_reqs]``; its first row in the forward.
        path_index: ``StepPlan.path_index``; None if the step had no drafts.
    """

    counts: np.ndarray
    first: np.ndarray
    path_index: torch.Tensor | None

    @classmethod
    def make(
        cls, query_start: np.ndarray, num_emitted: np.ndarray, num_drafts: np.ndarray, path_index: torch.Tensor
    ) -> AcceptedRows:
        """Count the rows.

        Args:
            query_start: int ``[num_reqs + 1]``; flat rows where the requests start.
            num_emitted, num_drafts: int ``[num_reqs]``; tokens emitted and nodes verified.
            path_index: of the step's plan.
        """
        counts = np.diff(query_start) - np.where(num_drafts > 0, num_drafts + 1 - num_emitted, 0)
        return cls(counts, query_start[:-1], path_index if num_drafts.any() else None)

    def of(self, chosen: np.ndarray) -> torch.Tensor:
        """Return the flat rows of these requests (bool ``[num_reqs]``), in their order: int64 ``[num_rows]``."""
        counts = self.counts[chosen]
        ends = np.cumsum(counts)
        flat = torch.from_numpy(np.arange(counts.sum()) + np.repeat(self.first[chosen] - ends + counts, counts))
        return flat if self.path_index is None else self.path_index[flat]


@dataclass
class ServedStep(StepRecord):
    """Record of a step, for code that only watches.

    Attributes:
        began: when it began, in seconds of ``time.perf_counter``.
        req_ids: of the batch.
        tree, walk: that were verified, and what was accepted; None in a step without drafts.
        drafts: by request, the drafts that were proposed for the step.
        hidden_states: ``[num_flat_rows, hidden_size]``; the target's.
        accepted_rows: the rows of its accepted tokens.
        counts: increments of the counters of ``utils.metrics``, by name.
    """

    began: float = 0.0
    req_ids: list[str] = field(default_factory=list)
    tree: TokenTree | None = None
    walk: Walk | None = None
    drafts: dict[str, FlatDraft] = field(default_factory=dict)
    hidden_states: torch.Tensor | None = None
    accepted_rows: AcceptedRows | None = None
    counts: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Set an attribute to the seconds of the block."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, time.perf_counter() - begin)


class DraftPhase:
    """Mixed into the V1 runner."""

    _counters: Counters
    _trace: TreeTrace | None
    _verify_start: float
    reloading: Reloading | None

    def _init_drafting(self, vllm_config: Any, device: torch.device, has_custom_processors: bool) -> None:
        options = self.speculative_config.specplug
        self.drafter = make_v1_drafter(vllm_config, device, self)
        self._drafting = make_drafting(options, self.model_config.get_vocab_size())
        self._draft_guard = Guard(options.method)
        #: The last draft of each request: a request that is not scheduled keeps its draft.
        self._drafts: dict[str, FlatDraft] = {}
        #: Requests that turn speculation off.
        self._without_drafts: set[str] = set()
        self.draft_noise = DraftNoise(self, options, has_custom_processors)
        #: None: the budget is fixed.
        self.serving_budget = ServingBudget(self, options) if options.budget == "measured" else None
        self.recorder: Recorder | None = None
        self.served = ServedStep()
        #: Each takes the record of a step when it has ended.
        self.observers: list[Callable[[ServedStep], None]] = [self._count_step, self._show_walk, self._record_rows]
        #: None: another rank watches.
        self.draft_watch: StepWatch | None = None
        if leads():
            self.draft_watch = StepWatch(options, self.speculative_config.draft_entries, self._counters)
            self.observers.append(self.draft_watch)

    def start_recording(self) -> None:
        """Record requests from here on, if the options say so; called at the end of the start, after the proof."""
        if leads():  # all ranks have the same hidden states
            self.recorder = make_recorder(self, self.speculative_config.specplug)

    def prepare_budget(self) -> None:
        """Time the parts of a step, unless that was done before; called at the end of the start."""
        if self.serving_budget is not None:
            self.serving_budget.prepare()

    def _begin_request(self, new: Any) -> None:
        """Take notice of a new request, or of a session's next turn; ``new`` is vLLM's data of it."""
        self._drafting.add(new.req_id, getattr(new, "namespace", 0))  # the proof's requests have none
        self._without_drafts.discard(new.req_id)
        if new.sampling_params is not None and not wants_speculation(new.sampling_params.extra_args):
            self._without_drafts.add(new.req_id)

    def _finish_requests(self, request_ids: set[str]) -> None:
        if self.recorder is not None:
            self.recorder.finish(request_ids)
        self._without_drafts -= request_ids
        for req_id in request_ids:
            self._drafts.pop(req_id, None)
        for part in (self.draft_noise, self.drafter, self._drafting, self.serving_budget, self.reloading):
            if part is not None:
                part.finish(request_ids)

    # ---- the record of a step

    def _begin_step(self, scheduler_output: Any) -> None:
        began, scheduled = time.perf_counter(), scheduler_output.num_scheduled_tokens
        rows = scheduler_output.total_num_scheduled_tokens
        num_nodes = sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
        continues = bool(scheduled) and not scheduler_output.scheduled_new_reqs
        decodes = continues and rows == len(scheduled) + num_nodes
        self.served = ServedStep(len(scheduled), num_nodes, 0 if decodes else rows, began=began)
        if self.serving_budget is not None:
            self.serving_budget.begin(began, continues)

    def _walked(self, tree: TokenTree, walk: Walk, active: np.ndarray) -> None:
        """Note what was verified; ``active`` bool ``[num_reqs]``: requests that emit tokens."""
        step, num_rows = self.served, tree.num_rows.numpy()
        step.num_accepted = int(walk.num_emitted.numpy().sum() - active.sum())
        step.req_ids, step.tree, step.walk, step.drafts = list(self.input_batch.req_ids), tree, walk, dict(self._drafts)
        if num_rows.max() > 1:
            step.counts |= {"steps": 1.0, "verify_seconds": time.perf_counter() - self._verify_start}
            if self.input_batch.sampling_metadata.max_num_logprobs == -1:
                step.counts["logprobs of the whole vocabulary"] = int((num_rows > 1).sum())

    def _end_step(self) -> None:
        for observe in self.observers:
            observe(self.served)
        if self.serving_budget is not None:
            self.serving_budget.ended(self.served, self.served.began)
        self.served = ServedStep()  # its tensors are not kept

    def _count_step(self, step: ServedStep) -> None:
        for name, amount in step.counts.items():
            self._counters.add(name, amount)

    def _show_walk(self, step: ServedStep) -> None:
        if step.tree is None:
            return
        if self._trace is not None:
            self._trace.write(step.req_ids, step.tree, step.walk, step.drafts)
        if self.reloading is not None:
            self.reloading.walked(step.req_ids, step.tree, step.walk)

    def _record_rows(self, step: ServedStep) -> None:
        if self.recorder is not None and step.accepted_rows is not None:
            self.recorder.read(step.hidden_states, step.accepted_rows)

    # ---- drafting

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        # vLLM asks this of the longest request for the whole batch.  Our draft levels write no pages, and
        # the scheduler cuts each request's drafts at max_model_len.
        return common_attn_metadata is not None

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: Any,
        sampling_metadata: Any,
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        spec_decode_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> list[list[int]]:
        inputs = (scheduler_output, sampled_token_ids, sampling_metadata, hidden_states, sample_hidden_states)
        inputs = (*inputs, aux_hidden_states, spec_decode_metadata, *args)
        propose_by_vllm = functools.partial(super().propose_draft_token_ids, *inputs, **kwargs)
        step, budget, drafter = self.served, self.serving_budget, self.drafter
        num_drafts = _num_drafts(spec_decode_metadata, len(sampled_token_ids))
        step.hidden_states, step.accepted_rows = hidden_states, self._accepted_rows(sampled_token_ids, num_drafts)
        # 1. Plan: which drafters run, and how far.
        began, failures = time.perf_counter(), Guard.total_failures
        wanted = self._wanted()
        plan = EVERYTHING if budget is None else budget.plan(wanted)
        drafter.limits, drafter.record = plan, step
        if drafter.before_draft is not None:
            drafter.before_draft(wanted, hidden_states)
        planned, ran = time.perf_counter(), False

        # 2. Draft.  The model-free proposers come first; the model drafter catches up, then drafts.
        def draft_by_model(expected: torch.Tensor | None) -> Draft | None:
            nonlocal ran
            if not plan.arm.model or not (budget is None or budget.wants_model(expected, wanted)):
                return None
            ran = True
            if drafter.missed.num_rows:
                with step.timed("catching_up"):
                    self._draft_guard.run(drafter.catch_up)
            with step.timed("by_model"):
                if drafter.operator is not None:
                    return drafter.propose_by_operator(hidden_states, step.accepted_rows)
                return propose_by_vllm()

        draft = None
        if plan.arm is not PLAIN:
            draft = self._drafting.propose(self.input_batch, wanted, draft_by_model)
        if not ran:
            drafter.skip_draft(hidden_states, aux_hidden_states, step.accepted_rows)
        # 3. Select the nodes to verify, over all requests.
        step.drafting = time.perf_counter() - began
        if budget is not None and plan.arm is not PLAIN:
            draft = budget.select(draft, wanted, step)
        step.counts["draft_seconds"] = time.perf_counter() - planned
        step.counts["proposer failed"] = Guard.total_failures - failures
        if draft is not None:
            step.counts["not read by the drafter"] = len(drafter.missed.unread.intersection(self.input_batch.req_ids))
        # 4. Keep the trees until they are verified.
        flat = self._keep(draft)
        if drafter.after_draft is not None:
            with step.timed("searching"):
                self._draft_guard.run(functools.partial(drafter.after_draft, self._verify_start))
        return flat

    @property
    def samples_drafts(self) -> bool:
        """Whether the next draft is sampled for any request."""
        noise = self.draft_noise
        return (noise.couples or noise.rejects) and not self.input_batch.all_greedy

    def _wanted(self) -> np.ndarray:
        """Return the requests that decode in the next step and take drafts, bool ``[num_reqs]``."""
        wanted = ~self.discard_request_mask.np[: self.input_batch.num_reqs]
        return wanted & [req_id not in self._without_drafts for req_id in self.input_batch.req_ids]

    def _accepted_rows(self, sampled_token_ids: list[list[int]], num_drafts: np.ndarray) -> AcceptedRows:
        emitted = np.array([len(token_ids) for token_ids in sampled_token_ids])
        query_start = self.query_start_loc.np[: len(emitted) + 1].copy()
        return AcceptedRows.make(query_start, emitted, num_drafts, self._plan.path_index)

    # ---- the trees until they are verified

    def _keep(self, draft: Draft | None) -> list[list[int]]:
        """Keep the drafts by request and return the flat tokens for the scheduler."""
        req_ids = self.input_batch.req_ids
        turned_off = [req_id in self._without_drafts for req_id in req_ids]
        self.served.counts["turned off by the request"] = sum(turned_off)
        if draft is None:
            for req_id in req_ids:
                self._drafts.pop(req_id, None)
            return [[] for _ in req_ids]
        flat = flatten(draft, None if draft.proposal is None else self.draft_noise.rejected(len(req_ids)))
        for index, req_id in enumerate(req_ids):
            if turned_off[index]:
                flat[index] = FlatDraft([], [], [])
            self._drafts[req_id] = flat[index]
        return [list(one.token_ids) for one in flat]  # the scheduler cuts its lists in place

    def _fill_parents(self, row: np.ndarray, req_id: str, scheduler_output: Any) -> FlatDraft | None:
        """Write the parents of a request's scheduled drafts.

        Any prefix of a parent-first list is a tree, so that a truncated draft keeps its parents.

        Returns:
            The draft, if all of it was scheduled.
        """
        draft_token_ids = list(scheduler_output.scheduled_spec_decode_tokens[req_id])
        count = len(draft_token_ids)
        draft = self._drafts.get(req_id)
        if draft is not None and draft.token_ids[:count] != draft_token_ids:
            draft = None
        parents = scheduler_output.parents.get(req_id) if isinstance(scheduler_output, TreeSchedulerOutput) else None
        if parents is None and draft is not None:
            parents = draft.parents[:count]
        if parents is not None:
            row[1 : count + 1] = parents
        return draft if draft is not None and draft.parents == parents else None

    def take_draft_token_ids(self) -> TreeDraftTokenIds | None:
        taken = super().take_draft_token_ids()
        if taken is None:
            return None
        parents = [self._drafts[req_id].parents if req_id in self._drafts else [] for req_id in taken.req_ids]
        return TreeDraftTokenIds(taken.req_ids, taken.draft_token_ids, parents)


def flatten(draft: Draft, rejected: Sequence[bool] | None = None) -> list[FlatDraft]:
    """Split the drafts of a batch by request; ``rejected`` marks those verified by rejection (default: none)."""
    tree, names, proposal = draft.tree, draft.source_names, draft.proposal
    sizes = tree.num_rows.tolist()
    token_ids, parents, log_values = tree.token_ids.tolist(), tree.parents.tolist(), draft.log_values.tolist()
    bits = [()] * len(sizes) if draft.source_bits is None else draft.source_bits.tolist()
    return [
        FlatDraft(
            token_ids[request][1:size],
            parents[request][1:size],
            log_values[request][1:size],
            [[name for s, name in enumerate(names) if word >> s & 1] for word in bits[request][1:size]],
            DrawnFrom(proposal.index[request, 1:size], proposal.token_ids[request], proposal.probs[request])
            if proposal is not None and rejected is not None and rejected[request]
            else None,
        )
        for request, size in enumerate(sizes)
    ]


def _num_drafts(spec_decode_metadata: Any, num_reqs: int) -> np.ndarray:
    """Return each request's verified nodes.  Until 0.31 vLLM has no such metadata in a step without drafts."""
    if spec_decode_metadata is None:
        return np.zeros(num_reqs, dtype=np.int64)
    return np.asarray(spec_decode_metadata.num_draft_tokens)
