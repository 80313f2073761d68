"""Seconds of a step: tables measured at start, corrected by the times of the steps while serving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

#: Assumed relative deviation of the time of one step from its mean; not measured.
NOISE = 0.15
#: Share of the certainty that is lost in each step: an estimate follows a change within some hundred steps.
FORGETTING = 1e-3
#: Largest deviation that counts, in standard deviations: an interrupted step changes an estimate little.
MOST_DEVIATIONS = 2.0


class Filter:
    """Estimates weights from noisy sums of features: a Kalman filter whose uncertainty grows back slowly.

    Args:
        weights: the start, float ``[n]``.
        covariance: of the start, float ``[n, n]``.
        forgetting: share of the certainty that is lost with each observation.

    Raises:
        ValueError: the start has another number of weights, as one that an earlier version saved.
    """

    def __init__(self, weights: Any, covariance: Any, forgetting: float = FORGETTING):
        self.weights, self._prior = np.array(weights, dtype=np.float64), np.array(covariance, dtype=np.float64)
        self._covariance, self._forgetting = self._prior.copy(), forgetting
        if len(self.weights) != len(self._prior):
            raise ValueError(f"{len(self.weights)} weights where there are {len(self._prior)}")

    @property
    def variances(self) -> np.ndarray:
        """Uncertainty of the weights, float64 ``[n]``."""
        return self._covariance.diagonal()

    def observe(self, features: np.ndarray, value: float, noise: float, elapsed: float = 1.0) -> None:
        """Correct the weights.

        Args:
            features: float ``[n]``; ``features @ weights`` predicts ``value``.
            value: observed.
            noise: its standard deviation.
            elapsed: steps since the last observation.
        """
        self._covariance += min(self._forgetting * elapsed, 1.0) * (self._prior - self._covariance)
        spread = self._covariance @ features
        variance = float(features @ spread) + noise**2
        most = MOST_DEVIATIONS * variance**0.5
        gain = spread / variance
        self.weights += gain * min(max(value - float(features @ self.weights), -most), most)
        self._covariance -= np.outer(gain, spread)


class CountTable:
    """Seconds by a count: linear between the measured counts, never decreasing, the last slope goes on.

    Args:
        points: seconds by count.
    """

    def __init__(self, points: Mapping[int, float]):
        self._counts = np.array(sorted(points), dtype=np.float64)
        self._seconds = np.maximum.accumulate([max(points[count], 1e-7) for count in sorted(points)])
        steps = np.diff(self._counts[-2:])
        self._slope = float((np.diff(self._seconds[-2:]) / steps)[0]) if len(steps) else 0.0

    def at(self, count: Any) -> Any:
        """Return the seconds of a count, or of an array of counts."""
        beyond = np.maximum(count - self._counts[-1], 0.0)
        return np.interp(count, self._counts, self._seconds) + self._slope * beyond


class StepCost:
    """Seconds of steps whose rows may be any number (CPU): the step without its draft phase, and parts of the latter.

    A step takes the seconds of the target's forward over its rows, as measured at start, times a factor, and seconds
    for vLLM's own work, for each further request (its context is attended to), for each node, and for having trees.
    The last four are in units of a forward over one row.

    Args:
        measured: seconds by rows of ``verify`` (the target's forward), and of a drafter that grows by levels of
            ``read`` (its first forward) and ``level`` (a further one).
        most_rows: largest number of rows of a step.
        weights: as learned by an earlier server.
    """

    #: Start of the weights, and how uncertain it is; assumed, not measured.  The first steps replace the second one.
    START, SPREAD = (1.0, 0.1, 0.0, 0.0, 0.1), (0.3, 1.0, 0.02, 0.02, 0.1)

    def __init__(
        self, measured: Mapping[str, Mapping[int, float]], most_rows: int, weights: Mapping[str, list] | None = None
    ):
        weights = weights or {}
        self.measured = {part: dict(points) for part, points in measured.items()}
        self._tables = {part: CountTable(points) for part, points in measured.items()}
        self._forwards = self._tables["verify"].at(np.arange(1, most_rows + 1))
        self._step = Filter(weights.get("verify", self.START), np.diag(np.square(self.SPREAD)))
        self._factors = {
            part: Filter(weights.get(part, [1.0]), [[0.3**2]]) for part in self._tables if part != "verify"
        }
        self._known: dict[int, np.ndarray] = {}

    @property
    def one_row(self) -> float:
        """Seconds of the target's forward over one row, as measured."""
        return float(self._forwards[0])

    def verification(self, num_reqs: int) -> np.ndarray:
        """Return the seconds of a step, float64 ``[n]``, by the number of nodes of all requests; 0 nodes: plain."""
        if num_reqs not in self._known:
            forwards = self._forwards[min(num_reqs, len(self._forwards)) - 1 :]
            factor, *others = self._step.weights.tolist()
            own, per_request, per_node, with_trees = (self._forwards[0] * weight for weight in others)
            seconds = factor * forwards + per_node * np.arange(len(forwards)) + (own + per_request * (num_reqs - 1))
            seconds[1:] += with_trees
            self._known[num_reqs] = np.maximum.accumulate(np.maximum(seconds, 1e-6))
        return self._known[num_reqs]

    def plain(self, num_reqs: int) -> float:
        """Return the seconds of a step without nodes."""
        return float(self.verification(num_reqs)[0])

    def part(self, part: str, num_rows: float) -> float:
        """Return the seconds of ``read`` or ``level`` over so many rows; 0 if it was not measured."""
        if part not in self._factors or num_rows <= 0:
            return 0.0
        return float(self._factors[part].weights[0] * self._tables[part].at(num_rows))

    def observe_step(self, num_reqs: int, num_nodes: int, seconds: float, elapsed: float = 1.0) -> None:
        """Learn from a step without prompts; ``elapsed``: steps since the last one of its kind."""
        forward, unit = self._forwards[min(num_reqs + num_nodes, len(self._forwards)) - 1], self._forwards[0]
        features = np.array([forward, unit, unit * (num_reqs - 1), unit * num_nodes, unit * (num_nodes > 0)])
        self._step.observe(features, seconds, NOISE * float(features @ self._step.weights), elapsed)
        self._known.clear()

    def observe_part(self, part: str, num_rows: int, seconds: float) -> None:
        """Learn from a forward of the drafter."""
        if part in self._factors and num_rows > 0:
            features = np.array([self._tables[part].at(num_rows)])
            self._factors[part].observe(features, seconds, NOISE * float(features[0]))

    @property
    def weights(self) -> dict[str, list[float]]:
        """Weights of the constructor, as they are now."""
        factors = {part: one.weights.tolist() for part, one in self._factors.items()}
        return {"verify": self._step.weights.tolist(), **factors}


class RoundCost:
    """Seconds of rounds, which have one of a few shapes (GPU): the step and the draft phase that follows it.

    A round takes the seconds measured at start times a factor of its shape, and what steps take beyond that at present
    (contexts grow, the CPU is busy): for batches of about its size, in units of a plain round.

    Args:
        measured: by nodes of a shape (0: plain), seconds by number of requests.
        max_num_reqs: largest number of requests.
        weights: as learned by an earlier server.

    Raises:
        ValueError: plain rounds are missing.
    """

    #: Uncertainty of the measurements: of all shapes with drafts together, of each by itself, and of the seconds
    #: beyond.
    COMMON, OWN, BEYOND = 0.15, 0.05, 0.15

    def __init__(
        self, measured: Mapping[int, Mapping[int, float]], max_num_reqs: int, weights: Sequence[float] | None = None
    ):
        if 0 not in measured:
            raise ValueError("the seconds of plain steps are missing")
        self.measured = {nodes: dict(points) for nodes, points in measured.items()}
        self._tables = {nodes: CountTable(points) for nodes, points in sorted(measured.items())}
        self._index = {nodes: index for index, nodes in enumerate(self._tables)}
        shapes, sizes = len(measured), max_num_reqs.bit_length() + 1
        covariance = np.zeros((shapes + sizes, shapes + sizes))
        covariance[1:shapes, 1:shapes] = self.COMMON**2
        covariance[range(1, shapes), range(1, shapes)] += self.OWN**2
        covariance[shapes:, shapes:] = self.BEYOND**2 / 2 * (1 + np.eye(sizes))
        self._filter = Filter(weights or [1.0] * shapes + [0.0] * sizes, covariance, 5 * FORGETTING)

    @property
    def weights(self) -> list[float]:
        """Weights of the constructor, as they are now."""
        return self._filter.weights.tolist()

    def _features(self, nodes: int, num_reqs: int) -> np.ndarray:
        features, shapes = np.zeros(len(self._filter.weights)), len(self._tables)
        features[self._index[nodes]] = self._tables[nodes].at(num_reqs)
        features[shapes + num_reqs.bit_length()] = self._tables[0].at(num_reqs)
        return features

    def at(self, nodes: int, num_reqs: int) -> float:
        """Return the seconds of a round."""
        features = self._features(nodes, num_reqs)
        return max(float(features @ self._filter.weights), 0.1 * float(features[self._index[nodes]]))

    def observe(self, nodes: int, num_reqs: int, seconds: float) -> None:
        """Learn from a round in which all requests decode."""
        if nodes in self._index and num_reqs:
            self._filter.observe(self._features(nodes, num_reqs), seconds, NOISE / 3 * self.at(nodes, num_reqs))


def counts_up_to(limit: int) -> list[int]:
    """Return the rows to measure: all small numbers, then about three per doubling, then ``limit``.

    Products are computed in tiles of some rows, so a row that begins a tile costs more than the others.
    """
    counts = [*range(1, 10), 12, 13, 16, 17, 24, 32, 48, 64, 96, 128, 192, 256]
    return [count for count in counts if count < limit] + [max(limit, 1)]
