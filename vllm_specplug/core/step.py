"""One served decode step.  Both model runners (``cpu/runner``, ``gpu/runner``) call these functions.

propose   the drafter grew a tree after each request's last token, one step earlier    core/growth, proposers/
lay out   tree rows get positions and ancestor masks                                   before_forward
verify    vLLM's forward; tree rows attend by their masks                              hosts/attention, kernels/
walk      vLLM's sampler selects the accepted path                                     core/walk, hosts/v*/
commit    accepted key/value moves to the slots after the context                      after_forward, core/kv
re-seed   the drafter reads the accepted rows and proposes the next tree               after_forward, hosts/drafters
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vllm_specplug.types import PADDING, Walk


@dataclass(frozen=True)
class StepPlan:
    """Everything that follows from one walk, in flat rows of the verification forward.

    Attributes:
        source_rows: int64 ``[num_reqs, max_emitted]``; row of each accepted token: the root, then the accepted nodes.
            then ``PADDING``.  The drafter re-reads the target's hidden states of these rows.
        target_rows: int64, same shape; row whose cache slot receives the token's key/value.  Never above its source.
        path_index: int64 ``[num_flat_rows]``; row that holds the accepted token of each flat row: ``source_rows`` at
            ``target_rows``, elsewhere the row itself.
        last_rows: int64 ``[num_reqs]``; row whose logits gave the newest token; the root's if nothing was emitted.
    """

    source_rows: torch.Tensor
    target_rows: torch.Tensor
    path_index: torch.Tensor
    last_rows: torch.Tensor


class StepRunner(Protocol):
    """What a model runner does for the step in its own memory: V1 on the CPU's values, V2 on the device's."""

    def lay_out_trees(self, batch: Any) -> Any | None:
        """Write positions of tree rows and return what attention needs to know of them; None without trees."""

    def commit(self, plan: StepPlan) -> None:
        """Move the accepted rows' key/value, in all layers of the target."""

    def follow(self, plan: StepPlan) -> None:
        """Give the drafter the rows that it reads next."""


def before_forward(runner: StepRunner, batch: Any) -> Any | None:
    """Lay out the trees of a batch; the result goes into the attention metadata."""
    return runner.lay_out_trees(batch)


def after_forward(
    runner: StepRunner,
    walk: Walk,
    row_start: torch.Tensor,
    num_flat_rows: int,
    plan_by: Callable[[Walk, torch.Tensor, int], StepPlan] | None = None,
) -> StepPlan:
    """Commit what the walk accepted.

    Args:
        runner: of the step.
        walk: its result.
        row_start: int ``[num_reqs]``; flat row of each root.
        num_flat_rows: rows of the forward.
        plan_by: a kernel that does what ``plan_step`` does; None: ``plan_step``.
    """
    plan = (plan_by or plan_step)(walk, row_start, num_flat_rows)
    runner.commit(plan)
    runner.follow(plan)
    return plan


def plan_step(walk: Walk, row_start: torch.Tensor, num_flat_rows: int) -> StepPlan:
    """Turn a walk into everything that follows from it, without reading values back from a device."""
    depths, first = torch.arange(walk.path_rows.shape[1], device=row_start.device), row_start.long().unsqueeze(1)
    accepted = (depths == 0) | (depths < walk.num_emitted.unsqueeze(1))
    sources, targets = (torch.where(accepted, first + rows, PADDING) for rows in (walk.path_rows, depths))
    path_index = torch.arange(num_flat_rows + 1, device=row_start.device)  # the last entry takes the padding
    path_index.scatter_(0, targets.flatten() % len(path_index), sources.flatten())
    return StepPlan(sources, targets, path_index[:-1], sources.amax(dim=1))
