"""vLLM's schedulers for the V2 runner, with grammars that follow trees and with requests that are decoded plainly.

On this runner drafts stay on the device.  For batches with structured output vLLM copies them to the CPU behind the
draft phase, and asks for them after the next forward was launched: while that runs, the masks of its rows are computed.
vLLM's own masks follow a chain; here each row gets the mask of its path.  Nodes that the grammar forbids stay in the
tree: their parent's mask keeps the walk away from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus

from vllm_specplug.core.request_args import wants_speculation
from vllm_specplug.gpu.budget import BudgetedRounds
from vllm_specplug.vllm.draft_watch import WatchedDrafts
from vllm_specplug.vllm.grammars import TreeDraftTokenIds, constrained_requests, since_033, tree_masks
from vllm_specplug.vllm.requests import TreeRequestRules

#: Rows that get a mask in one step, over all requests: their masks must be ready when the forward ends.
MASKED_ROWS = 512


def decodes_plainly(request: Any) -> bool:
    """Whether a request gets no drafts."""
    params = request.sampling_params
    return params is not None and not wants_speculation(params.extra_args)


def answer_ends(scheduler_output: SchedulerOutput) -> dict[str, int]:
    """Return the tokens of ended requests up to the end of their answers, see ``TreeRequests.schedule``."""
    return getattr(scheduler_output, "answer_ends", {})


class TreeRequests(TreeRequestRules):
    """Mixed into a scheduler of vLLM."""

    #: The last drafts that were copied to the CPU: tokens and parents of the nodes, by request.
    _trees: dict[str, tuple[list[int], list[int]]]
    #: Tokens of requests when their answers, or turns of them, ended; the worker has not been told yet.
    _ends: dict[str, int]

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._trees, self._ends = {}, {}

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step, and tell the worker where answers ended: it may have sampled tokens after a stop."""
        output = super().schedule(*args, **kwargs)
        self.name_requests(output.scheduled_new_reqs)
        told = output.finished_req_ids.union(new.req_id for new in output.scheduled_new_reqs)
        output.answer_ends = {req_id: self._ends.pop(req_id) for req_id in told & self._ends.keys()}
        return output

    def _handle_stopped_request(self, request: Any) -> bool:
        self._ends[request.request_id] = request.num_tokens
        return super()._handle_stopped_request(request)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        for req_id in scheduler_output.num_scheduled_tokens:
            if decodes_plainly(self.requests[req_id]):
                self.requests[req_id].spec_token_ids = []

    def update_draft_token_ids(self, draft_token_ids: TreeDraftTokenIds) -> None:
        """Take the drafts of the next step; called by a synchronous scheduler."""
        self._keep(draft_token_ids)
        others = DraftTokenIds([], [])
        for req_id, token_ids in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            request = self.requests.get(req_id)
            if request is None or decodes_plainly(request):
                continue
            if request.status != RequestStatus.RUNNING:  # its turn has just ended
                continue
            if request.use_structured_output and not request.is_prefill_chunk:
                request.spec_token_ids = list(token_ids)  # vLLM would cut them to a chain that the grammar allows
            else:
                others.req_ids.append(req_id)
                others.draft_token_ids.append(token_ids)
        super().update_draft_token_ids(others)

    def update_draft_token_ids_in_output(
        self, draft_token_ids: TreeDraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        """Put the drafts in the place of placeholders in a step that runs; called with asynchronous scheduling."""
        self._keep(draft_token_ids)
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        for req_id, (token_ids, _) in self._trees.items():
            request = self.requests.get(req_id)
            if request is not None and request.use_structured_output and req_id in scheduled:
                scheduled[req_id] = token_ids[: len(scheduled[req_id])]

    def _keep(self, drafts: TreeDraftTokenIds) -> None:
        known = zip(drafts.req_ids, drafts.draft_token_ids, drafts.parents, strict=False)  # no parents: not copied
        self._trees = {req_id: (list(token_ids), list(parents)) for req_id, token_ids, parents in known}

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Return a mask for each row of a tree, that of its path.

        Rows beyond ``MASKED_ROWS``, and those of a tree that is not known, stay unmasked; the worker is told to accept
        none of their nodes.
        """
        if not scheduler_output.has_structured_output_requests or not scheduler_output.scheduled_spec_decode_tokens:
            return super().get_grammar_bitmask(scheduler_output)
        requests = constrained_requests(self, scheduler_output)
        if not requests:
            return None
        most, trees, acceptable = MASKED_ROWS // len(requests) - 1, [], []
        for request in requests:
            scheduled = scheduler_output.scheduled_spec_decode_tokens.get(request.request_id, ())
            tree, count = self._masked_tree(request.request_id, scheduled, max(most, 0))
            trees.append(tree)
            acceptable.append(count)
        masks = tree_masks(self.structured_output_manager, requests, trees)
        return GrammarOutput([request.request_id for request in requests], masks, acceptable)

    def _masked_tree(self, req_id: str, scheduled: Sequence[int], most: int) -> tuple[tuple[list[int], list[int]], int]:
        """Return tokens and parents of a tree, with placeholders behind its first ``most`` nodes, and their number."""
        token_ids, parents = self._trees.get(req_id, ([], []))
        is_known = token_ids[: len(scheduled)] == list(scheduled)
        count = min(most, len(scheduled)) if is_known else 0
        rows = self.num_spec_tokens if since_033(self.structured_output_manager) else len(scheduled)
        placeholders = rows - count
        return (token_ids[:count] + [-1] * placeholders, parents[:count] + [0] * placeholders), count


class SyncTreeScheduler(TreeRequests, WatchedDrafts, BudgetedRounds, Scheduler):
    pass


class AsyncTreeScheduler(TreeRequests, WatchedDrafts, BudgetedRounds, AsyncScheduler):
    pass


def tree_scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> Scheduler:
    """Make the scheduler; used in place of a class, because vLLM decides late whether scheduling is asynchronous."""
    chosen = AsyncTreeScheduler if vllm_config.scheduler_config.async_scheduling else SyncTreeScheduler
    return chosen(vllm_config, *args, **kwargs)
