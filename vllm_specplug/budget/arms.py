"""The arms of the bandit, and what the drafts of each have been worth.

An *arm* is a set of drafters that can run in a step.  The plain arm runs none: the step then decodes one token per
request.  The *value* of drafted nodes is the expected number of them that the target accepts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_specplug.utils.compiled import compiled

#: Steps after which a recent observation of an arm's value counts 1/e.  Chosen by hand; not swept.
RECENT_MEMORY = 48.0
#: Requests that the long-run mean counts as beside the recent one.  Chosen by hand; not swept.
LONG_RUN_WEIGHT = 4.0
#: Requests after which an old observation counts about 1/e in the long-run mean.  Chosen by hand; not swept.
LONG_RUN_MEMORY = 2000.0
#: Requests that the assumed value of a new arm counts as.  Chosen by hand; not swept.
FIRST_REQUESTS = 8.0
#: Requests that a long-run mean read from a file counts as: more than the assumed one, less than a mean learned in
#: this process, so that new traffic changes it.  Chosen by hand; not swept.
SAVED_REQUESTS = 100.0
#: Assumed probability that the target accepts the next node of a chain, before any draft was seen.  The EAGLE heads of
#: docs/measurements.md (*Drafters and their training*) reach 0.60 to 0.66 by level.  Not swept.
FIRST_ACCEPTANCE = 0.6


@dataclass(frozen=True)
class Arm:
    """A set of drafters that can run together.

    Attributes:
        name: for people, and in saved files.
        model: whether the model drafter (EAGLE, Medusa, SWIFT) runs.
        model_free: whether the model-free proposers (lookup, unions of it, third-party ones) run.
    """

    name: str
    model: bool
    model_free: bool


PLAIN = Arm("plain", model=False, model_free=False)


class ArmValue:
    """The mean value of an arm's drafts per request, by levels allowed and nodes verified.

    Attributes:
        recent, long_run: float64 ``[max_levels, num_nodes + 2]``; the values of the best 0 to ``num_nodes`` nodes, and
            in the last column the levels that were drafted.
        weight: requests that ``recent`` counts as, with decay.
        requests: requests that ``long_run`` counts as.
    """

    def __init__(self, max_levels: int, num_nodes: int):
        levels, nodes = np.arange(1, max_levels + 1)[:, None], np.arange(num_nodes + 1)[None]
        depth = np.minimum(nodes, levels if max_levels > 1 else num_nodes)
        values = FIRST_ACCEPTANCE * (1 - FIRST_ACCEPTANCE**depth) / (1 - FIRST_ACCEPTANCE)
        self.long_run = np.concatenate([values, levels], axis=1)
        self.recent = np.zeros_like(self.long_run)
        self.weight, self.requests = 0.0, FIRST_REQUESTS

    def age(self) -> None:
        """Let the recent observations count less; called once in each step."""
        self.weight *= np.exp(-1 / RECENT_MEMORY)

    def learn(self, values: np.ndarray, depths: np.ndarray, num_reqs: int, drafted_levels: int) -> None:
        """Add the drafts of one step.

        Args:
            values: float64 ``[n, num_rows]``; of the nodes, 0 where there is none.
            depths: int64 ``[n, num_rows]``.
            num_reqs: requests to average over.
            drafted_levels: levels that were drafted.
        """
        mean = np.empty_like(self.long_run)
        max_levels = len(mean)
        levels = np.arange(1, max_levels + 1)
        # With a single row, levels are not told apart: all nodes count in it.
        limits = levels if max_levels > 1 else np.array([values.shape[1]])
        mean[:, :-1] = best_sums(values, depths, limits, num_reqs, mean.shape[1] - 2)
        mean[:, -1] = np.minimum(drafted_levels, levels) if max_levels > 1 else drafted_levels
        self._add(mean, num_reqs)

    def _add(self, mean: np.ndarray, num_reqs: int) -> None:
        self.weight += num_reqs
        self.recent += (mean - self.recent) * (num_reqs / self.weight)
        self.requests = min(self.requests + num_reqs, LONG_RUN_MEMORY)
        self.long_run += (mean - self.long_run) * (num_reqs / self.requests)

    def mean(self) -> np.ndarray:
        """Return the mean of recent and long-run values, float64 ``[max_levels, num_nodes + 2]``."""
        total = self.weight + LONG_RUN_WEIGHT
        return (self.weight * self.recent + LONG_RUN_WEIGHT * self.long_run) / total


@compiled
def best_sums(values: np.ndarray, depths: np.ndarray, levels: np.ndarray, num_reqs: int, most: int) -> np.ndarray:
    """Compute the mean summed value of a request's best nodes, by levels allowed and number of nodes.

    Args:
        values: float64 ``[n, num_rows]``; 0 where there is no node, or where it does not count.
        depths: int64 ``[n, num_rows]``.
        levels: int64 ``[num_levels]``; nodes up to this depth count.
        num_reqs: requests to average over.
        most: largest number of nodes.

    Returns:
        float64 ``[num_levels, most + 1]``.
    """
    sums, ordered = np.zeros((len(levels), most + 1)), np.empty(values.shape[1])
    for level in range(len(levels)):
        for request in range(len(values)):
            count = 0
            for row in range(values.shape[1]):
                if values[request, row] > 0.0 and depths[request, row] <= levels[level]:
                    ordered[count] = -values[request, row]
                    count += 1
            best = np.sort(ordered[:count])
            for number in range(min(count, most)):
                sums[level, number + 1] -= best[number] / num_reqs
        for number in range(1, most + 1):
            sums[level, number] += sums[level, number - 1]
    return sums
