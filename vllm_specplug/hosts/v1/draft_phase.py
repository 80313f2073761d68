"""The draft phase of the V1 runner, behind each step: catch up, propose, select, keep the trees."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from vllm_specplug.budget.arms import PLAIN
from vllm_specplug.core.guard import Guard
from vllm_specplug.core.request_args import wants_speculation
from vllm_specplug.hosts.drafters.accepted_rows import AcceptedRows
from vllm_specplug.hosts.drafters.base import make_v1_drafter
from vllm_specplug.hosts.drafters.draft_noise import DraftNoise
from vllm_specplug.hosts.drafters.flat_draft import FlatDraft, flatten
from vllm_specplug.hosts.drafters.model_free import make_drafting
from vllm_specplug.hosts.grammars import TreeDraftTokenIds
from vllm_specplug.hosts.ranks import leads
from vllm_specplug.hosts.v1.budgeting import serving_budget
from vllm_specplug.hosts.v1.recording import NoRecording, Recorder, make_recorder
from vllm_specplug.hosts.v1.scheduler import TreeSchedulerOutput
from vllm_specplug.types import Draft
from vllm_specplug.utils.metrics import Counters


class DraftPhase:
    """Mixed into the V1 runner."""

    _counters: Counters
    _verify_start: float

    def _init_drafting(self, vllm_config: Any, device: torch.device, has_custom_processors: bool) -> None:
        options = self.speculative_config.specplug
        self.drafter = make_v1_drafter(vllm_config, device, self)
        self._drafting = make_drafting(options, self.model_config.get_vocab_size())
        self._draft_guard = Guard(options.method)
        #: The last draft of each request: a request that is not scheduled keeps its draft.
        self._drafts: dict[str, FlatDraft] = {}
        self.draft_noise = DraftNoise(self, options, has_custom_processors)
        self.serving_budget = serving_budget(self, options)
        self.recorder = NoRecording()

    def start_recording(self) -> None:
        """Record requests from here on, if the options say so; called at the end of the start, behind the proof."""
        if leads():  # all ranks have the same hidden states
            self.recorder = make_recorder(self, self.speculative_config.specplug)

    def prepare_budget(self) -> None:
        """Time the parts of a step, unless that was done before; called at the end of the start."""
        self.serving_budget.prepare()

    def _finish_requests(self, request_ids: set[str]) -> None:
        self.recorder.finish(request_ids)
        for req_id in request_ids:
            self._drafts.pop(req_id, None)
        for part in (self.draft_noise, self.drafter, self._drafting, self.serving_budget, self.reloading):
            part.finish(request_ids)

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
        propose_by_vllm = functools.partial(
            super().propose_draft_token_ids,
            *(scheduler_output, sampled_token_ids, sampling_metadata, hidden_states, sample_hidden_states),
            *(aux_hidden_states, spec_decode_metadata, *args),
            **kwargs,
        )
        num_drafts = _num_drafts(spec_decode_metadata, len(sampled_token_ids))
        if isinstance(self.recorder, Recorder):
            self._record(sampled_token_ids, hidden_states, num_drafts)
        wanted = ~self.discard_request_mask.np[: self.input_batch.num_reqs]
        wanted &= [self._speculates(req_id) for req_id in self.input_batch.req_ids]
        budget, drafter, failures = self.serving_budget, self.drafter, Guard.total_failures
        arm = budget.plan(wanted)
        drafter.before_draft(wanted, hidden_states)
        ran = caught_up = False

        def draft_by_model(expected: torch.Tensor | None) -> Draft | None:
            nonlocal ran, caught_up
            if not (arm.model and budget.wants_model_drafter(expected)):
                return None
            ran, caught_up = True, drafter.missed.num_rows > 0
            if caught_up:
                budget.catch_up(functools.partial(self._draft_guard.run, drafter.catch_up))
            if drafter.operator is None:
                return budget.timed(propose_by_vllm)
            arguments = hidden_states, sampled_token_ids, num_drafts
            return budget.timed(functools.partial(drafter.propose_by_operator, *arguments))

        with self._counters.timed("draft_seconds"):
            draft = None
            if arm is not PLAIN:
                propose = functools.partial(self._drafting.propose, self.input_batch, wanted, draft_by_model)
                draft = budget.propose(propose)
            if not ran:
                drafter.skip_draft(hidden_states, aux_hidden_states, sampled_token_ids, num_drafts)
            draft = budget.select(draft, wanted)
        self._counters.add("proposer failed", Guard.total_failures - failures)
        if draft is not None:
            unread = drafter.missed.unread.intersection(self.input_batch.req_ids)
            self._counters.add("not read by the drafter", len(unread))
        flat = self._keep(draft)
        budget.drafts_kept(caught_up)
        self._draft_guard.run(functools.partial(drafter.after_draft, self._verify_start))
        budget.end_draft()
        return flat

    def _record(self, sampled_token_ids: list[list[int]], hidden_states: torch.Tensor, num_drafts: np.ndarray) -> None:
        emitted = np.array([len(token_ids) for token_ids in sampled_token_ids])
        query_start = self.query_start_loc.np[: len(emitted) + 1]
        rows = AcceptedRows.make(query_start, emitted, num_drafts, self._plan.path_index)
        self.recorder.read(hidden_states, rows)

    # ---- the trees until they are verified

    def _keep(self, draft: Draft | None) -> list[list[int]]:
        """Keep the drafts by request and return the flat tokens for the scheduler."""
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

    def _speculates(self, req_id: str) -> bool:
        params = self.requests[req_id].sampling_params
        return params is None or wants_speculation(params.extra_args)


def _num_drafts(spec_decode_metadata: Any, num_reqs: int) -> np.ndarray:
    """Return each request's verified nodes.  Until 0.31 vLLM has no such metadata in a step without drafts."""
    if spec_decode_metadata is None:
        return np.zeros(num_reqs, dtype=np.int64)
    return np.asarray(spec_decode_metadata.num_draft_tokens)
