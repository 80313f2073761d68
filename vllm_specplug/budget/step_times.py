"""Seconds of whole rounds by shape and number of requests: measured at start, followed while serving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_specplug.budget.costs import CostTable

#: Weight of a plain step's deviation in what all shapes take beyond the tables (contexts grow, the CPU is busy), per
#: step since the last plain one, and its limit.  Chosen by hand; swept over 0.02 to 0.1 in the simulation.
EXTRA_RATE, MOST_EXTRA = 0.05, 0.7
#: A step that took so many times as long as expected was disturbed, and counts as this many.  Chosen by hand.
DISTURBED = 2.0


class StepTimes:
    """Estimates the seconds of a round: the target's forward, walk, commit and the draft phase behind it.

    Args:
        measured: by nodes of a shape (0: plain), seconds by number of requests.
        max_num_reqs: largest number of requests.
    """

    #: Uncertainty of the measured seconds, common to all batch sizes and of each by itself.  Chosen by hand; not swept.
    COMMON, SMOOTH = 0.15, 0.05

    def __init__(self, measured: Mapping[int, Mapping[int, float]], max_num_reqs: int):
        if 0 not in measured:
            raise ValueError("the seconds of plain steps are missing")
        self.tables = {
            nodes: CostTable(points, points.values(), max_num_reqs, self.COMMON, self.SMOOTH)
            for nodes, points in ((nodes, dict(sorted(points.items()))) for nodes, points in measured.items())
        }
        #: By bit length of the number of requests: seconds that a plain step takes beyond its table.
        self._extra: dict[int, float] = {}
        self._last_step: dict[int, int] = {}

    def at(self, nodes: int, num_reqs: int) -> float:
        """Return the seconds of a round."""
        table = self.tables[nodes].at(num_reqs)
        return max(table + self._extra_of(num_reqs), 0.1 * table)

    def _extra_of(self, num_reqs: int) -> float:
        size = num_reqs.bit_length()
        if size in self._extra or not self._extra:
            return self._extra.get(size, 0.0)
        return self._extra[min(self._extra, key=lambda known: abs(known - size))]

    def observe(self, nodes: int, num_reqs: int, seconds: float, step: int) -> None:
        """Add the time of a step.

        Args:
            nodes: of its shape.
            num_reqs: all of them decode.
            seconds: that it took.
            step: number of the step.
        """
        expected = self.at(nodes, num_reqs)
        seconds = min(seconds, DISTURBED * expected)
        elapsed = step - self._last_step.get(nodes, step - 1)
        self._last_step[nodes] = step
        extra = self._extra_of(num_reqs)
        if nodes == 0:  # what a plain step shows holds for all shapes
            rate = min(EXTRA_RATE * max(elapsed, 1), MOST_EXTRA)
            self._extra[num_reqs.bit_length()] = extra + rate * (seconds - expected)
        else:
            self.tables[nodes].observe(num_reqs, seconds - extra, max(elapsed, 1))

    def to_json(self) -> dict[str, Any]:
        """Return the tables, for ``measured_in``."""
        return {str(nodes): table.to_json() for nodes, table in self.tables.items()}

    @staticmethod
    def measured_in(saved: Mapping[str, Any]) -> dict[int, dict[int, float]]:
        """Return the constructor's ``measured`` from the result of ``to_json``."""
        return {
            int(nodes): dict(zip(map(int, table["counts"]), table["seconds"], strict=True))
            for nodes, table in saved.items()
        }


def counts_to_measure(most: int) -> list[int]:
    """Return the numbers of requests to time: powers of two, and the largest."""
    return [1 << i for i in range(most.bit_length()) if 1 << i < most] + [most]


def can_pay(nodes: int, depth: int, seconds: float, plain: float) -> bool:
    """Return whether a shape would pay if every level of its tree were accepted."""
    return nodes == 0 or seconds < (depth + 1) * plain
