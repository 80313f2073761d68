"""The accepted nodes to expect of each shape, learned from how many were accepted."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_specplug.budget.costs import CostTable
from vllm_specplug.budget.shapes import Shape

#: Accepted nodes of a request per doubling of the rows, before any draft was seen: a tree of 60 nodes then has 3, about
#: what EAGLE-2 reports for dialogue (Li et al. 2024, table 1).  Not swept.
FIRST_PER_DOUBLING = 0.5
#: Most steps that may pass between two outcomes of a shape and still count as forgetting.  Chosen by hand; not swept.
MOST_ELAPSED = 16.0


class AcceptanceTable(CostTable):
    """Estimates accepted nodes per request by the nodes of a shape.

    The filter is that of ``CostTable``: what one shape shows changes the others too, the nearest most, and a larger
    shape is never worth less.

    Args:
        shapes: with drafts.
    """

    #: Share of the certainty that is lost in each step.  Chosen by hand; not swept.
    FORGETTING = 4e-4
    #: Uncertainty of the start: of all shapes together, and of each by itself, relative.  Chosen by hand; not swept.
    COMMON, SMOOTH = 1.0, 0.3

    def __init__(self, shapes: Sequence[Shape]):
        depths = {1: 1} | {shape.nodes: shape.depth for shape in shapes}
        expected = [
            min(FIRST_PER_DOUBLING * (nodes + 1).bit_length(), 0.9 * depth) for nodes, depth in sorted(depths.items())
        ]
        super().__init__(sorted(depths), expected, max(depths), self.COMMON, self.SMOOTH)
        self._last_step = 0

    def _noise(self, expected: float, num_times: int) -> float:
        """Accepted nodes of one request spread like tries until the first failure."""
        return ((expected + 0.05) * (1 + expected) / num_times) ** 0.5

    def learn(self, nodes: int, num_accepted: float, num_reqs: int, step: int) -> None:
        """Add what came of one step.

        Args:
            nodes: of its shape.
            num_accepted: accepted nodes of all requests.
            num_reqs: requests with drafts.
            step: number of the step.
        """
        elapsed = min(max(step - self._last_step, 1), MOST_ELAPSED)
        self._last_step = step
        self.observe(nodes, max(num_accepted / num_reqs, 1e-6), elapsed, num_reqs)
