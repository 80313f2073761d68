"""Rows of the target that a drafter with a KV cache has not read while drafting paused.

A paused step must cost as much as a plain one, so that the drafter does not run at all.  The target's hidden states of
the step's tokens are kept instead.  When drafting resumes, one forward over them writes the key/value that the drafter
lacks.  The kept rows are bounded: a request that does not fit (prompts, under load) stays unread and decodes plainly
until it ends.  A request that ends while drafting is paused leaves a gap in its blocks.  A later request that finds
those blocks in the prefix cache is drafted worse, and decodes the same tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass
class _Missed:
    """Tokens ``[start, stop)`` of one request, as rows of kept tensors."""

    start: int
    stop: int
    parts: list[tuple[torch.Tensor, int, int]] = field(default_factory=list)

    def hidden(self) -> torch.Tensor:
        return torch.cat([rows[first:last] for rows, first, last in self.parts])


class MissedRows:
    """The hidden states that the drafter has not read, by request.

    Args:
        max_rows: most rows to keep, which bounds the catch-up forward.

    Attributes:
        num_rows: rows that are kept.
        unread: requests with a gap that stays.
    """

    def __init__(self, max_rows: int):
        self.max_rows = max_rows
        self.num_rows = 0
        self.unread: set[str] = set()
        self._missed: dict[str, _Missed] = {}

    def admit(self, request_ids: Sequence[str], counts: np.ndarray) -> np.ndarray:
        """Decide which requests' rows of a step are kept; the other requests are unread from now on.

        Args:
            request_ids: of the step.
            counts: int ``[num_reqs]``; rows of each.

        Returns:
            bool ``[num_reqs]``.
        """
        room = self.max_rows - self.num_rows
        kept = np.zeros(len(request_ids), dtype=bool)
        for place, (request_id, count) in enumerate(zip(request_ids, counts.tolist(), strict=True)):
            if request_id in self.unread:
                continue
            if count > room:
                self._forget(request_id)
                self.unread.add(request_id)
                continue
            room -= count
            kept[place] = True
        return kept

    def add(self, request_ids: Sequence[str], hidden: torch.Tensor, starts: list[int], counts: list[int]) -> None:
        """Keep rows of one step, of admitted requests.

        Args:
            request_ids: in the order of the rows.
            hidden: ``[num_rows, hidden_size]``; kept without a copy, so that it must not be a reused buffer.
            starts: index of each request's first token among its tokens.
            counts: rows of each request.
        """
        first = 0
        for request_id, start, count in zip(request_ids, starts, counts, strict=True):
            missed = self._missed.get(request_id)
            if missed is not None and missed.stop != start:  # preempted, and computed again from some token on
                self._forget(request_id)
                missed = None
            if missed is None:
                missed = self._missed[request_id] = _Missed(start, start)
            missed.parts.append((hidden, first, first + count))
            missed.stop += count
            first += count
        self.num_rows += first

    def take(self, request_ids: Sequence[str]) -> list[tuple[int, int, torch.Tensor]]:
        """Return and forget what these requests have missed: (index in ``request_ids``, start, hidden states)."""
        taken = []
        for place, request_id in enumerate(request_ids):
            missed = self._missed.get(request_id)
            if missed is not None:
                taken.append((place, missed.start, missed.hidden()))
                self._forget(request_id)
        return taken

    def finish(self, request_ids: Collection[str]) -> None:
        """Forget requests that have ended."""
        self.unread.difference_update(request_ids)
        for request_id in request_ids:
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        if (missed := self._missed.pop(request_id, None)) is not None:
            self.num_rows -= missed.stop - missed.start
