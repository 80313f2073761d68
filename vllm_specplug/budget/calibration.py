"""Learns the probability that the target accepts a node, from a drafter's estimates; online, with decay."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

#: Probabilities stay this far from 0 and 1: log odds must be finite.
FLOOR = 1e-4
LOGIT_LIMIT = float(np.log((1 - FLOOR) / FLOOR))
#: Outcomes of one Newton step: they are collected until there are so many, because each step costs the same time.
BATCH = 64
#: Largest record of a request, in log odds: it cannot overrule the calibration.
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
        prior_strength: outcomes that the start counts as.
        memory: outcomes after which an old one counts 1/e.
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

    def log_odds(self, models: np.ndarray, features: np.ndarray) -> np.ndarray:
        """Compute the log odds of acceptance; ``sigmoid`` gives the probabilities.

        Args:
            models: int ``[...]``; the model of each node.
            features: float ``[..., num_features]``.
        """
        if np.size(models) and np.min(models) < 0:
            raise IndexError("no such model")
        return (np.asarray(features) * self.weights[models]).sum(axis=-1)

    def learn(self, models: np.ndarray, features: np.ndarray, accepted: np.ndarray) -> None:
        """Add outcomes.

        Args:
            models: int ``[n]``; the model of each outcome.
            features: float ``[n, num_features]``.
            accepted: bool ``[n]``.
        """
        self._waiting.append((models, features, accepted))
        self._num_waiting += len(models)
        if self._num_waiting >= BATCH:
            waiting, self._waiting, self._num_waiting = self._waiting, [], 0
            self._fit(*map(np.concatenate, zip(*waiting, strict=True)))

    def _fit(self, models: np.ndarray, features: np.ndarray, accepted: np.ndarray) -> None:
        for model in np.unique(models).tolist():
            mine = np.flatnonzero(models == model)
            self.outcomes[model] += len(mine)
            for begin in range(0, len(mine), BATCH):
                part = mine[begin : begin + BATCH]
                self._take_newton_step(model, features[part], accepted[part])

    def _take_newton_step(self, model: int, features: np.ndarray, accepted: np.ndarray) -> None:
        p = sigmoid(features @ self.weights[model])
        bend = np.maximum(p * (1 - p), 0.02)  # certain outcomes must not make the steps long
        self._curvature[model] *= math.exp(-len(features) / self.memory)
        self._curvature[model] += (features * bend[:, None]).T @ features
        step = np.linalg.solve(self._curvature[model] + self._prior, features.T @ (accepted - p))
        self.weights[model] += np.minimum(np.maximum(step, -1.0), 1.0)  # the model is no parabola far away
