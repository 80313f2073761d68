"""Learns the probability that the target accepts a node from what a drafter estimates; online, with decay."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from vllm_specplug.utils.compiled import compiled

#: Probabilities stay this far from 0 and 1: nothing is certain, and log odds must be finite.  Chosen by hand.
FLOOR = 1e-4
LOGIT_LIMIT = float(np.log((1 - FLOOR) / FLOOR))

#: Outcomes are collected until there are so many: a fit costs little per outcome, but much per call.  A Newton step
#: runs over at most so many, since one over all of a large batch would be too long.  Chosen by hand; not swept.
BATCH = 64
#: Largest record of a request, in log odds: it cannot overrule the calibration.  Chosen by hand; not swept.
RECORD_LIMIT = 2.0


def log_odds_of(log_probabilities: np.ndarray) -> np.ndarray:
    """Compute log odds from logarithms of probabilities (none above 0); the result is finite."""
    unlikely = np.maximum(-np.expm1(log_probabilities), 1e-30)  # numpy warns of a logarithm of 0
    return _within_limits(log_probabilities - np.log(unlikely))


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Compute probabilities from log odds; the result is from ``FLOOR`` to ``1 - FLOOR``."""
    return 1 / (1 + np.exp(_within_limits(-logits)))


def log_ratio(accepted: float, expected: float) -> float:
    """Compute how much better a request's drafts did than expected of any request, as log odds (its *record*)."""
    return min(max(math.log((accepted + 1) / (expected + 1)), -RECORD_LIMIT), RECORD_LIMIT)


def _within_limits(logits: np.ndarray) -> np.ndarray:
    """Clip like ``np.clip``, in a third of its time at these sizes."""
    return np.minimum(np.maximum(logits, -LOGIT_LIMIT), LOGIT_LIMIT)


@dataclass
class OnlineLogistic:
    """Fits several logistic models of acceptance over the same features, one for each kind of node.

    Each is fitted by Newton steps over the newest outcomes; the curvature of older ones is kept with decay.  So a model
    changes fast while it has seen little, and follows a change of traffic within ``memory`` outcomes.

    Attributes:
        weights: float64 ``[num_models, num_features]``; the start, changed in place.
        prior_strength: outcomes that the start counts as.  The default is chosen by hand; not swept.
        memory: outcomes after which an old one counts 1/e.  The default is chosen by hand; not swept.
        outcomes: float64 ``[num_models]``; outcomes learned from.
    """

    weights: np.ndarray
    prior_strength: float = 20.0
    memory: float = 2000.0
    outcomes: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.weights = np.ascontiguousarray(self.weights, dtype=np.float64)
        num_models, num_features = self.weights.shape
        self.outcomes = np.zeros(num_models)
        # An outcome at probability 1/2 has curvature 1/4.
        self._prior = np.eye(num_features) * self.prior_strength / 4
        self._curvature = np.zeros((num_models, num_features, num_features))
        self._waiting: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._num_waiting = 0
        # Compiles the loop now; the first real fit comes in the middle of serving.
        self._fit(np.zeros(0, dtype=np.int64), np.zeros((0, num_features)), np.zeros(0))

    def log_odds(self, models: np.ndarray, features: np.ndarray) -> np.ndarray:
        """Compute the log odds of acceptance; ``sigmoid`` gives the probabilities.

        Args:
            models: int ``[...]``; the model of each node.
            features: float ``[..., num_features]``.
        """
        shape = np.shape(models)
        log_odds = np.empty(shape)
        features = np.ascontiguousarray(features, dtype=np.float64).reshape(log_odds.size, self.weights.shape[1])
        _products(np.ascontiguousarray(models, dtype=np.int64).ravel(), features, self.weights, log_odds.ravel())
        return log_odds

    def learn(self, models: np.ndarray, features: np.ndarray, accepted: np.ndarray) -> None:
        """Add outcomes.

        Args:
            models: int ``[n]``; the model of each outcome.
            features: float ``[n, num_features]``.
            accepted: bool ``[n]``.
        """
        if len(models) == 0:
            return
        self._waiting.append((models, features, accepted))
        self._num_waiting += len(models)
        if self._num_waiting >= BATCH:
            waiting, self._waiting, self._num_waiting = self._waiting, [], 0
            self._fit(*map(np.concatenate, zip(*waiting, strict=True)))

    def _fit(self, models: np.ndarray, features: np.ndarray, accepted: np.ndarray) -> None:
        num_models, num_features = self.weights.shape
        counts = np.bincount(models, minlength=num_models)
        if len(counts) > num_models:
            raise IndexError(f"there are {num_models} models")
        self.outcomes += counts
        _take_newton_steps(
            np.argsort(models, kind="stable"),
            counts,
            np.ascontiguousarray(features, dtype=np.float64),
            np.ascontiguousarray(accepted, dtype=np.float64),
            self.weights,
            self._curvature,
            self._prior,
            float(self.memory),
            np.empty((num_features, num_features)),
            np.empty(num_features),
        )


@compiled
def _products(models: np.ndarray, features: np.ndarray, weights: np.ndarray, products: np.ndarray) -> None:
    """Write each outcome's features times its model's weights to ``products`` (float64 ``[n]``)."""
    for index, model in enumerate(models):
        if not 0 <= model < weights.shape[0]:
            raise IndexError("no such model")
        total = 0.0
        for feature in range(weights.shape[1]):
            total += features[index, feature] * weights[model, feature]
        products[index] = total


@compiled
def _take_newton_steps(
    order: np.ndarray,
    counts: np.ndarray,
    features: np.ndarray,
    accepted: np.ndarray,
    weights: np.ndarray,
    curvature: np.ndarray,
    prior: np.ndarray,
    memory: float,
    system: np.ndarray,
    step: np.ndarray,
) -> None:
    """Take the Newton steps of each model over its outcomes.

    Args:
        order: int64 ``[n]``; indices of the outcomes, by model, then in the order in which they came.
        counts: int64 ``[num_models]``; number of outcomes of each model.
        features: float64 ``[n, num_features]``.
        accepted: float64 ``[n]``.
        weights, curvature: of ``OnlineLogistic``; changed in place.
        prior, memory: of ``OnlineLogistic``.
        system, step: float64 ``[num_features, num_features]`` and ``[num_features]``; overwritten.
    """
    num_models, num_features = weights.shape
    begin = stop = 0
    for model in range(num_models):
        stop += counts[model]
        while begin < stop:
            end = min(begin + BATCH, stop)
            fade = math.exp(-(end - begin) / memory)
            for i in range(num_features):
                step[i] = 0.0
                for j in range(num_features):
                    curvature[model, i, j] *= fade
            for at in range(begin, end):
                index = order[at]
                logit = 0.0
                for i in range(num_features):
                    logit += features[index, i] * weights[model, i]
                p = 1 / (1 + math.exp(min(max(-logit, -LOGIT_LIMIT), LOGIT_LIMIT)))
                bend = max(p * (1 - p), 0.02)  # certain outcomes must not make the steps long; not swept
                for i in range(num_features):
                    step[i] += features[index, i] * (accepted[index] - p)
                    bent = features[index, i] * bend
                    for j in range(num_features):
                        curvature[model, i, j] += bent * features[index, j]
            for i in range(num_features):
                for j in range(num_features):
                    system[i, j] = curvature[model, i, j] + prior[i, j]
            _solve(system, step)
            for i in range(num_features):
                weights[model, i] += min(max(step[i], -1.0), 1.0)  # the model is no parabola far away; not swept
            begin = end


@compiled
def _solve(matrix: np.ndarray, vector: np.ndarray) -> None:
    """Solve a linear system in place, by elimination without pivoting: the matrix is positive definite."""
    size = len(vector)
    for pivot in range(size):
        for row in range(pivot + 1, size):
            share = matrix[row, pivot] / matrix[pivot, pivot]
            for column in range(pivot + 1, size):
                matrix[row, column] -= share * matrix[pivot, column]
            vector[row] -= share * vector[pivot]
    for row in range(size - 1, -1, -1):
        for column in range(row + 1, size):
            vector[row] -= matrix[row, column] * vector[column]
        vector[row] /= matrix[row, row]


@dataclass
class Reliability:
    """Compares predicted with observed acceptance, in bins of the predicted probability, with decay.

    Attributes:
        num_bins: bins of equal width over [0, 1].
        memory: outcomes after which an old one counts 1/e.  It serves reports only; not swept.
    """

    num_bins: int = 10
    memory: float = 5000.0

    def __post_init__(self) -> None:
        self._sums = np.zeros((self.num_bins, 3))  # outcomes, predicted, accepted
        self._waiting: list[tuple[np.ndarray, np.ndarray]] = []
        self._num_waiting = 0
        _count(np.zeros(0), np.zeros(0), self._sums, 1.0)  # compiles the loop now

    def add(self, predicted: np.ndarray, accepted: np.ndarray) -> None:
        """Add outcomes: predicted probabilities float ``[n]``, accepted bool ``[n]``."""
        self._waiting.append((predicted, accepted))
        self._num_waiting += len(predicted)
        if self._num_waiting >= BATCH:
            self._take_in()

    def _take_in(self) -> None:
        if not self._num_waiting:
            return
        predicted, accepted = map(np.concatenate, zip(*self._waiting, strict=True))
        self._waiting, self._num_waiting = [], 0
        _count(
            np.ascontiguousarray(predicted, dtype=np.float64),
            np.ascontiguousarray(accepted, dtype=np.float64),
            self._sums,
            math.exp(-len(predicted) / self.memory),
        )

    def curve(self) -> list[tuple[float, float, float]]:
        """Return (outcomes, mean prediction, share accepted) of each bin that has any."""
        self._take_in()
        return [(n, p / n, y / n) for n, p, y in self._sums.tolist() if n > 0.5]

    def error(self) -> float:
        """Return the expected calibration error: the mean distance of prediction and outcome by bins."""
        self._take_in()
        total = self._sums[:, 0].sum()
        return float(np.abs(self._sums[:, 1] - self._sums[:, 2]).sum() / max(total, 1e-9))


@compiled
def _count(predicted: np.ndarray, accepted: np.ndarray, sums: np.ndarray, fade: float) -> None:
    """Multiply the sums (float64 ``[num_bins, 3]``) by ``fade``; add outcomes (float64 ``[n]`` each) to their bins."""
    num_bins = len(sums)
    for which in range(num_bins):
        for column in range(3):
            sums[which, column] *= fade
    for index in range(len(predicted)):
        which = min(max(int(predicted[index] * num_bins), 0), num_bins - 1)
        sums[which, 0] += 1
        sums[which, 1] += predicted[index]
        sums[which, 2] += accepted[index]
