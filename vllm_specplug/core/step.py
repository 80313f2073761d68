"""Results of the walk of a step: the commit, and the rows that the drafter reads next.

A step is ``cpu/step.py`` or ``gpu/step.py``; these functions are its oracle.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vllm_specplug.types import PADDING, Walk


@dataclass(frozen=True)
class StepPlan:
    """Everything that follows from one walk, in flat rows of the verification forward.

    Attributes:
        source_rows: int64 ``[num_reqs, max_emitted]``; row of each accepted token: the root, then the accepted nodes,
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


def plan_step(walk: Walk, row_start: torch.Tensor, num_flat_rows: int) -> StepPlan:
    """Turn a walk into everything that follows from it, without reading values back from a device."""
    depths, first = torch.arange(walk.path_rows.shape[1], device=row_start.device), row_start.long().unsqueeze(1)
    accepted = (depths == 0) | (depths < walk.num_emitted.unsqueeze(1))
    sources, targets = (torch.where(accepted, first + rows, PADDING) for rows in (walk.path_rows, depths))
    path_index = torch.arange(num_flat_rows + 1, device=row_start.device)  # the last entry takes the padding
    path_index.scatter_(0, targets.flatten() % len(path_index), sources.flatten())
    return StepPlan(sources, targets, path_index[:-1], sources.amax(dim=1))


def plain_plan(num_scheduled_tokens: np.ndarray, flat_rows: torch.Tensor) -> StepPlan:
    """Return the plan of a step without drafts: each request's last row; ``flat_rows`` counts up from 0."""
    last = torch.from_numpy(np.cumsum(num_scheduled_tokens) - 1)
    return StepPlan(last.unsqueeze(1), last.unsqueeze(1), flat_rows, last)
