"""When trees that grow by levels stop growing, and the time of their levels."""

from __future__ import annotations

import time

import torch


class Growth:
    """Decides which levels after the first one are drafted, and times them.

    Args:
        floors: of each level, see ``budget.choose.Plan``.

    Attributes:
        beams: of each level that was drafted, the sum that its floor is compared with.
        level_seconds: time of each of these.
    """

    def __init__(self, floors: list[float]):
        self.floors = floors
        self.beams: list[float] = []
        self.level_seconds: list[float] = []
        self._asked = 0.0

    def may_grow(self, beam_values: torch.Tensor) -> bool:
        """Decide whether the next level is drafted; it runs over nodes of these values, float ``[num_reqs, width]``."""
        self._asked = time.perf_counter()
        beam = float(beam_values.sum())
        if beam < self.floors[len(self.beams)]:
            return False
        self.beams.append(beam)
        return True

    def scored(self, level: int) -> None:
        """Note that a level was scored; the first one comes with the first pass."""
        if level:
            self.level_seconds.append(time.perf_counter() - self._asked)
