"""When trees that grow by levels stop growing, and the time of their levels."""

from __future__ import annotations

import time
from typing import Any

import torch


class Growth:
    """Decides whether the next level is drafted, and times the levels."""

    def __init__(self, floor: float, budget: Any):
        self.floor, self.budget = floor, budget
        self._asked = 0.0
        self._level_seconds: list[float] = []

    def may_grow(self, beam_values: torch.Tensor) -> bool:
        self._asked = time.perf_counter()
        grows = not self.floor or float(beam_values.sum()) >= self.floor * len(beam_values)
        return grows and self.budget.may_grow(beam_values)

    def scored(self, level: int) -> None:
        """Note that a level was scored; the first level comes with the first pass."""
        if level:
            self._level_seconds.append(time.perf_counter() - self._asked)

    def report(self, first_pass: float, num_rows: int, level_rows: int) -> None:
        """Report times to the budget: ``first_pass`` seconds over ``num_rows`` rows, and the levels."""
        self.budget.drafted(first_pass, num_rows, self._level_seconds, level_rows)
