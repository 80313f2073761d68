"""The host's schedulers for the V2 runner: some requests are decoded plainly, in the batch of those that are not.

Drafts stay on the device there.  To prune a tree by a grammar the host would have to wait for them, so a request with
structured output gets none, like one that has turned speculation off: a step gives it one row, as plain decoding does.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

from vllm_specplug.core.request_args import wants_speculation


def decodes_plainly(request: Any) -> bool:
    """Whether a request of the host gets no drafts on the V2 runner."""
    params = request.sampling_params
    return request.use_structured_output or (params is not None and not wants_speculation(params.extra_args))


class PlainRequests:
    """Mixed into a scheduler of the host."""

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


class SyncTreeScheduler(PlainRequests, Scheduler):
    pass


class AsyncTreeScheduler(PlainRequests, AsyncScheduler):
    pass


def tree_scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> Scheduler:
    """In the place of a class: the host decides late whether its scheduling is asynchronous."""
    chosen = AsyncTreeScheduler if vllm_config.scheduler_config.async_scheduling else SyncTreeScheduler
    return chosen(vllm_config, *args, **kwargs)
