"""The host's scheduler with grammars that follow trees, where its own follow the flat list of drafts.

The worker sends its drafts with its output, and their parents along.  Of a request with structured output only the
nodes that its grammar allows behind their path are scheduled, and every row's logits get the mask of that row's path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from vllm_specplug.hosts.compat.patches import Patch, apply_all
from vllm_specplug.hosts.v1.grammars import tree_masks, walk_grammar

_DRAFTS = "tree_draft_token_ids"


@dataclass
class TreeDraftTokenIds(DraftTokenIds):
    """The host's flat drafts, and per draft the row of each node's parent (0 is the root)."""

    parents: list[list[int]] = field(default_factory=list)


@dataclass
class TreeSchedulerOutput(SchedulerOutput):
    """The host's output, and the parents of drafts that the scheduler has pruned, by request."""

    parents: dict[str, list[int]] = field(default_factory=dict)


def _wrap_post_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def post_step(self, model_executed):
        if not getattr(self.scheduler, "has_drafts", False):
            original(self, model_executed)

    return post_step


#: A host that has changed here still works, more slowly: asked again, the worker gives the same drafts.
POST_STEP = Patch(
    target="vllm.v1.engine.core:EngineCore",
    attribute="post_step",
    parameters=("self", "model_executed"),
    reason="it asks the worker for drafts that have come with the worker's output",
    wrap=_wrap_post_step,
)


def attach_drafts(output: Any, drafts: TreeDraftTokenIds | None) -> Any:
    """Send a worker's drafts with its output: the host asks for them in a call of its own, a step's third."""
    # Without requests it may be the host's one empty output, shared by all such steps.
    if drafts is not None and isinstance(output, ModelRunnerOutput) and output.req_ids:
        setattr(output, _DRAFTS, drafts)
    return output


class TreeScheduler(Scheduler):
    """Takes drafts from the worker's output, and changes the steps of requests with structured output."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        #: Whether the last output brought its drafts.
        self.has_drafts = False
        apply_all([POST_STEP])
        #: Of structured requests: the drafts last allowed, and their parents.
        self._trees: dict[str, tuple[list[int], list[int]]] = {}

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        drafts = getattr(model_runner_output, _DRAFTS, None)
        self.has_drafts = drafts is not None
        if drafts is not None:
            self.update_draft_token_ids(drafts)
        return outputs

    def update_draft_token_ids(self, draft_token_ids: TreeDraftTokenIds) -> None:
        free = DraftTokenIds([], [])
        for req_id, token_ids, parents in zip(
            draft_token_ids.req_ids, draft_token_ids.draft_token_ids, draft_token_ids.parents, strict=True
        ):
            request = self.requests.get(req_id)
            if (
                request is None
                or request.is_finished()
                or request.is_prefill_chunk
                or not request.use_structured_output
            ):
                free.req_ids.append(req_id)
                free.draft_token_ids.append(token_ids)
                continue
            rows: list[int] = []
            walk_grammar(
                self.structured_output_manager,
                request,
                token_ids,
                parents,
                lambda row, _grammar, _forbidden, kept=rows: kept.append(row),
            )
            rows.sort()
            place = {row: new for new, row in enumerate(rows)}
            request.spec_token_ids = [token_ids[row - 1] for row in rows[1:]]
            self._trees[req_id] = (request.spec_token_ids, [place[parents[row - 1]] for row in rows[1:]])
        super().update_draft_token_ids(free)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = super().schedule(*args, **kwargs)
        for req_id in output.finished_req_ids:
            self._trees.pop(req_id, None)
        parents = {}
        for req_id, token_ids in output.scheduled_spec_decode_tokens.items():
            known, known_parents = self._trees.get(req_id, ((), ()))
            # Not so for the host's placeholders of a request that waits with one token left.
            if token_ids and list(known[: len(token_ids)]) == list(token_ids):
                parents[req_id] = list(known_parents[: len(token_ids)])
        if not parents:
            return output
        return TreeSchedulerOutput(**{f.name: getattr(output, f.name) for f in fields(output)}, parents=parents)

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        if not isinstance(scheduler_output, TreeSchedulerOutput):
            return super().get_grammar_bitmask(scheduler_output)
        requests = [
            self.requests[req_id]
            for req_id in scheduler_output.num_scheduled_tokens
            if req_id in self.requests
            and self.requests[req_id].use_structured_output
            and not self.requests[req_id].is_prefill_chunk
        ]
        if not requests:
            return None
        trees = []
        for request in requests:
            token_ids = scheduler_output.scheduled_spec_decode_tokens.get(request.request_id, ())
            trees.append((token_ids, scheduler_output.parents.get(request.request_id, range(len(token_ids)))))
        masks = tree_masks(self.structured_output_manager, requests, trees)
        return GrammarOutput([request.request_id for request in requests], masks)
