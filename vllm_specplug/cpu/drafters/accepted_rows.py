"""The rows of a step's forward that belong to accepted tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


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
