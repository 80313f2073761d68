"""vLLM's scheduler with grammars that follow trees; vLLM's own follow the flat list of drafts.

The worker sends its drafts and their parents with its output.  For a request with structured output only the nodes that
its grammar allows on their path are scheduled, and the logits of each row get the mask of the row's path.  With several
ranks the trees that the first one drafted are sent to all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from vllm_specplug.vllm.grammars import TreeDraftTokenIds, constrained_requests, tree_masks, walk_grammar
from vllm_specplug.vllm.patches import Patch, apply_all
from vllm_specplug.vllm.requests import TreeRequestRules

_DRAFTS = "tree_draft_token_ids"


@dataclass
class TreeSchedulerOutput(SchedulerOutput):
    """vLLM's scheduler output with, by request, the parents of drafts that the worker may not know."""

    parents: dict[str, list[int]] = field(default_factory=dict)


def _wrap_post_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def post_step(self, model_executed):
        if not getattr(self.scheduler, "has_drafts", False):
            original(self, model_executed)

    return post_step


#: Optional: without it vLLM queries the worker again, and receives the same drafts later.
POST_STEP = Patch(
    target="vllm.v1.engine.core:EngineCore",
    attribute="post_step",
    parameters=("self", "model_executed"),
    reason="it queries the worker for drafts that the worker's output already contained",
    wrap=_wrap_post_step,
)


def attach_drafts(output: Any, drafts: TreeDraftTokenIds | None) -> Any:
    """Attach a worker's drafts to its output, which saves vLLM's separate call for them in each step."""
    # Without requests it may be vLLM's constant empty output, shared by all such steps.
    if drafts is not None and isinstance(output, ModelRunnerOutput) and output.req_ids:
        setattr(output, _DRAFTS, drafts)
    return output


class TreeScheduler(TreeRequestRules, Scheduler):
    """Takes drafts from the worker's output, and prunes and masks the trees of requests with structured output."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        #: Whether the last worker output contained its drafts.
        self.has_drafts = False
        apply_all([POST_STEP])
        #: Whether other ranks need the trees that the first rank has drafted.
        self._sends_trees = self.parallel_config.world_size > 1
        #: By request: the drafts to verify next, and their parents, if the worker's own draft may be another one.
        self._trees: dict[str, tuple[list[int], list[int]]] = {}

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        drafts = getattr(model_runner_output, _DRAFTS, None)
        self.has_drafts = drafts is not None
        if drafts is not None:
            self.update_draft_token_ids(drafts)
        return outputs

    def update_draft_token_ids(self, draft_token_ids: TreeDraftTokenIds) -> None:
        unconstrained = DraftTokenIds([], [])
        for req_id, token_ids, parents in zip(
            draft_token_ids.req_ids, draft_token_ids.draft_token_ids, draft_token_ids.parents, strict=True
        ):
            request = self.requests.get(req_id)
            if request is None or request.status != RequestStatus.RUNNING:  # its turn has just ended
                continue
            if request.is_prefill_chunk or not request.use_structured_output:
                unconstrained.req_ids.append(req_id)
                unconstrained.draft_token_ids.append(token_ids)
                if self._sends_trees:
                    self._trees[req_id] = (list(token_ids), parents)
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
            new_rows = {row: new for new, row in enumerate(rows)}
            request.spec_token_ids = [token_ids[row - 1] for row in rows[1:]]
            self._trees[req_id] = (request.spec_token_ids, [new_rows[parents[row - 1]] for row in rows[1:]])
        super().update_draft_token_ids(unconstrained)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = super().schedule(*args, **kwargs)
        if output.scheduled_new_reqs:
            self.name_requests(output.scheduled_new_reqs)
        for req_id in output.finished_req_ids:
            self._trees.pop(req_id, None)
        parents = {}
        for req_id, token_ids in output.scheduled_spec_decode_tokens.items():
            known, known_parents = self._trees.get(req_id, ((), ()))
            # They differ for the placeholders of vLLM, for a request that waits with one token left.
            if token_ids and list(known[: len(token_ids)]) == list(token_ids):
                parents[req_id] = list(known_parents[: len(token_ids)])
        if not parents:
            return output
        return TreeSchedulerOutput(**{f.name: getattr(output, f.name) for f in fields(output)}, parents=parents)

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        if not isinstance(scheduler_output, TreeSchedulerOutput):
            return super().get_grammar_bitmask(scheduler_output)
        requests = constrained_requests(self, scheduler_output)
        if not requests:
            return None
        trees = []
        for request in requests:
            token_ids = scheduler_output.scheduled_spec_decode_tokens.get(request.request_id, ())
            trees.append((token_ids, scheduler_output.parents.get(request.request_id, range(len(token_ids)))))
        masks = tree_masks(self.structured_output_manager, requests, trees)
        return GrammarOutput([request.request_id for request in requests], masks)
