"""What drafts are worth: gain and cost of an arm (CPU), and the value that each level of a tree adds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_specplug.budget.planner import Outlook

#: Of an arm's first 8 drafts the shortest time counts: the first ones take up to ten times as long.
FIRST_TIMES = 8
#: Steps after which an old draft counts 1/e.
MEMORY = 48.0


@dataclass
class Worth:
    """Gain and cost of an arm's drafts in batches of about one size.

    Attributes:
        gains: float64 ``[num_levels]``; accepted nodes per request and step, by depth; a single level: all of them.
        cost: plain steps that a step with the drafts takes beyond one, without the levels after the first.
        reach: float64 ``[num_levels]``; share of the steps in which a level is drafted.
        requests, times: requests and steps that were seen.
    """

    gains: np.ndarray
    cost: float
    requests: float = 8.0
    times: int = 0
    _shortest: float = math.inf

    def __post_init__(self) -> None:
        self.reach = np.ones(len(self.gains))

    def outlook(self, level: float) -> tuple[Outlook, int]:
        """Return the expected gain of the best number of levels, and that number; one takes ``level`` plain steps."""
        gains, costs = self.gains.cumsum(), self.cost + level * (self.reach.cumsum() - 1)
        best = int(((1 + gains) / (1 + costs)).argmax())
        return Outlook(float(gains[best]), float(costs[best])), best + 1

    def learn(self, gains: np.ndarray, reach: np.ndarray, cost: float, most_cost: float, num_reqs: int) -> None:
        """Add a step: ``gains`` and ``reach`` of allowed levels; a cost above ``most_cost`` counts as this."""
        share, allowed = max(num_reqs / (self.requests + num_reqs), 1 / MEMORY), slice(len(gains))
        self.requests += num_reqs
        self.gains[allowed] += share * (gains - self.gains[allowed])
        self.reach[allowed] += share * (reach - self.reach[allowed])
        self.times += 1
        if self.times > FIRST_TIMES:
            self.cost += share * (min(cost, most_cost) - self.cost)
            return
        self._shortest = min(self._shortest, cost)
        self.cost = self._shortest if self.times == FIRST_TIMES else min(self.cost, self._shortest)


class LevelYields:
    """Value that levels add, and value of the nodes that they grow from; both start as after 8 accepted nodes.

    Args:
        max_levels: levels after the first.
    """

    #: Value added, and value of the nodes grown from; forgotten in 200 steps.
    START = np.array([4.0, 8.0])

    def __init__(self, max_levels: int):
        self._sums = np.tile(self.START, (max_levels, 1))

    def floors(self, tokens: float) -> list[float]:
        """Return the least sum of values of each level at which it is worth its cost of ``tokens``."""
        return (tokens * self._sums[:, 1] / self._sums[:, 0]).tolist()

    def learn(self, gained: np.ndarray, depths: np.ndarray, beams: Sequence[float]) -> None:
        """Add the levels of a step: ``gained`` float and ``depths`` int ``[num_reqs, num_rows]``."""
        self._sums += (self.START - self._sums) / 200
        if beams:
            by_depth = np.bincount(depths.ravel(), gained.ravel(), len(beams) + 2)[2:]
            self._sums[: len(beams)] += np.stack([by_depth[: len(beams)], beams], axis=1)
