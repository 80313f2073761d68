"""Whether one more level is drafted: by what earlier levels added, for the value of the nodes that they grew from."""

from __future__ import annotations

import numpy as np

from vllm_specplug.budget.costs import CostModel

#: Value that a level is assumed to add, and value of the nodes that it grew from, before any level was seen: half as
#: much, counted as 8 accepted nodes.  Chosen by hand; not swept.
FIRST_YIELD = np.array([4.0, 8.0])
#: Steps after which an old level counts 1/e.  Chosen by hand; not swept.
YIELD_MEMORY = 200


class LevelGrowth:
    """Decides level by level how deep the model drafter goes in a step.

    Args:
        costs: of the parts of a step.
        max_levels: levels of the drafter; 1 if it drafts all at once.
    """

    def __init__(self, costs: CostModel, max_levels: int):
        self._costs = costs
        #: float64 ``[max(max_levels, 1) + 1, 2]``, by level behind the first: the value that it added, and the value of
        #: the nodes that it grew from; with decay.
        self._yields = np.tile(FIRST_YIELD, (max(max_levels, 1) + 1, 1))
        #: Of this step: the summed value of the nodes that each further level grew from.
        self.beams: list[float] = []

    @property
    def num_levels(self) -> int:
        """Levels drafted in this step."""
        return len(self.beams) + 1

    def begin(self) -> None:
        """Start a step."""
        self.beams = []

    def floors(self, num_levels: int, tokens: float) -> list[float]:
        """Return what the values of the nodes that a level runs over must sum to, so that it is worth its cost.

        Args:
            num_levels: levels behind the first one.
            tokens: what a level costs.
        """
        yields = self._yields[np.minimum(np.arange(1, num_levels + 1), len(self._yields) - 1)]
        return (tokens * yields[:, 1] / yields[:, 0]).tolist()

    def learn(self, values: np.ndarray, keep: np.ndarray, depths: np.ndarray, num_reqs: int, rate: float) -> None:
        """Add what the levels of this step were worth.

        Args:
            values: float64 ``[n, num_rows]``; of the nodes, 0 where there is none.
            keep: bool ``[n, num_rows]``; nodes that are verified.
            depths: int64 ``[n, num_rows]``.
            num_reqs: requests that decode in the next step.
            rate: tokens that a second is worth.
        """
        if not self.beams:
            return
        # The cost of one more node; a step may have no room for two, or for any.
        first_nodes = self._costs.verification(num_reqs)[1:3]
        cost = rate * max(float(first_nodes[-1] - first_nodes[0]), 0.0) if len(first_nodes) else 0.0
        gained = np.where(keep, np.maximum(values - cost, 0.0), 0.0)
        self._yields += (FIRST_YIELD - self._yields) / YIELD_MEMORY
        for level, beam in enumerate(self.beams, start=1):
            self._yields[min(level, len(self._yields) - 1)] += (gained[depths == level + 1].sum(), beam)
