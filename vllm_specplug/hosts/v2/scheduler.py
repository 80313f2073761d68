"""vLLM's schedulers for the V2 runner, with some requests decoded plainly in the same batch.

On this runner drafts stay on the device.  Pruning a tree by a grammar would need them on the CPU, so a request with
structured output gets no drafts, as does a request with speculation turned off: it has one row in a step.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

from vllm_specplug.core.request_args import wants_speculation
from vllm_specplug.hosts.v2.budgeting import BudgetedRounds


def decodes_plainly(request: Any) -> bool:
    """Whether a request gets no drafts on the V2 runner."""
    params = request.sampling_params
    return request.use_structured_output or (params is not None and not wants_speculation(params.extra_args))


class PlainRequests:
    """Mixed into a scheduler of vLLM: removes the drafts of requests that are decoded plainly."""

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        for req_id in scheduler_output.num_scheduled_tokens:
            if decodes_plainly(self.requests[req_id]):
                self.requests[req_id].spec_token_ids = []

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        kept = DraftTokenIds([], [])
        for req_id, token_ids in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            request = self.requests.get(req_id)
            if request is not None and not decodes_plainly(request):
                kept.req_ids.append(req_id)
                kept.draft_token_ids.append(token_ids)
        super().update_draft_token_ids(kept)


class SyncTreeScheduler(PlainRequests, BudgetedRounds, Scheduler):
    pass


class AsyncTreeScheduler(PlainRequests, BudgetedRounds, AsyncScheduler):
    pass


def tree_scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> Scheduler:
    """Make the scheduler; used in place of a class, because vLLM decides late whether scheduling is asynchronous."""
    chosen = AsyncTreeScheduler if vllm_config.scheduler_config.async_scheduling else SyncTreeScheduler
    return chosen(vllm_config, *args, **kwargs)
