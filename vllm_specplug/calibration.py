"""What a proposer believes, turned into the probability that the target accepts: learned on line, with decay."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

#: Probabilities stay this far from 0 and 1: nothing is certain, and logits must be finite.
FLOOR = 1e-4
LOGIT_LIMIT = float(np.log((1 - FLOOR) / FLOOR))

#: Outcomes are gathered until there are so many: fitting costs little per outcome, but much per call.
BATCH = 64


def log_odds_of(log_probabilities: np.ndarray) -> np.ndarray:
    """Log odds of what has these logarithms (none above 0), finite."""
    with np.errstate(divide="ignore"):
        return np.clip(log_probabilities - np.log(-np.expm1(log_probabilities)), -LOGIT_LIMIT, LOGIT_LIMIT)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Probabilities of log odds, from ``FLOOR`` to ``1 - FLOOR``."""
    return 1 / (1 + np.exp(np.clip(-logits, -LOGIT_LIMIT, LOGIT_LIMIT)))


@dataclass
class OnlineLogistic:
    """Several logistic models of acceptance over the same features, one for each kind of node.

    Each is fitted by Newton steps over what came in last; the curvature of what came before is kept with decay, so that
    a model moves fast while it has seen little and follows a change of traffic within ``memory`` outcomes.

    Attributes:
        weights: float64 ``[num_models, num_features]``; the start, changed in place.
        prior_strength: how many outcomes the start is worth.
        memory: outcomes after which an old one counts 1/e.
        outcomes: float64 ``[num_models]``; outcomes learned from.
    """

    weights: np.ndarray
    prior_strength: float = 20.0
    memory: float = 2000.0
    outcomes: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        num_models, num_features = self.weights.shape
        self.outcomes = np.zeros(num_models)
        # An outcome at probability 1/2 has curvature 1/4.
        self._prior = np.eye(num_features) * self.prior_strength / 4
        self._curvature = np.zeros((num_models, num_features, num_features))
        self._waiting: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._num_waiting = 0

    def log_odds(self, models: np.ndarray, features: np.ndarray) -> np.ndarray:
        """Log odds of acceptance; ``sigmoid`` makes them probabilities.

        Args:
            models: int ``[...]``; the model of each node.
            features: float ``[..., num_features]``.
        """
        return np.einsum("...f,...f->...", features, self.weights[models])

    def learn(self, models: np.ndarray, features: np.ndarray, accepted: np.ndarray) -> None:
        """Take in outcomes: int ``[n]``, float ``[n, num_features]``, bool ``[n]``."""
        if len(models) == 0:
            return
        self._waiting.append((models, features, accepted))
        self._num_waiting += len(models)
        if self._num_waiting >= BATCH:
            all_models, all_features, all_accepted = map(np.concatenate, zip(*self._waiting, strict=True))
            self._waiting, self._num_waiting = [], 0
            for model in np.unique(all_models):
                chosen = all_models == model
                self._fit(int(model), all_features[chosen], all_accepted[chosen])

    def _fit(self, model: int, features: np.ndarray, accepted: np.ndarray) -> None:
        for start in range(0, len(features), BATCH):  # one step over many outcomes would be too long
            x, y = features[start : start + BATCH], accepted[start : start + BATCH]
            p = sigmoid(x @ self.weights[model])
            self._curvature[model] *= np.exp(-len(x) / self.memory)
            self._curvature[model] += (x * np.maximum(p * (1 - p), 0.02)[:, None]).T @ x
            step = np.linalg.solve(self._curvature[model] + self._prior, x.T @ (y - p))
            self.weights[model] += np.clip(step, -1.0, 1.0)
        self.outcomes[model] += len(features)


@dataclass
class Reliability:
    """What was predicted against what happened, in bins of the predicted probability, with decay.

    Attributes:
        num_bins: bins of equal width over [0, 1].
        memory: outcomes after which an old one counts 1/e.
    """

    num_bins: int = 10
    memory: float = 5000.0

    def __post_init__(self) -> None:
        self._sums = np.zeros((self.num_bins, 3))  # outcomes, predicted, accepted
        self._waiting: list[tuple[np.ndarray, np.ndarray]] = []
        self._num_waiting = 0

    def add(self, predicted: np.ndarray, accepted: np.ndarray) -> None:
        """Take in outcomes: float ``[n]``, bool ``[n]``."""
        self._waiting.append((predicted, accepted))
        self._num_waiting += len(predicted)
        if self._num_waiting >= BATCH:
            self._take_in()

    def _take_in(self) -> None:
        if not self._num_waiting:
            return
        predicted, accepted = map(np.concatenate, zip(*self._waiting, strict=True))
        self._waiting, self._num_waiting = [], 0
        bins = np.minimum((predicted * self.num_bins).astype(int), self.num_bins - 1)
        self._sums *= np.exp(-len(predicted) / self.memory)
        for column, values in enumerate((None, predicted, accepted)):
            self._sums[:, column] += np.bincount(bins, values, minlength=self.num_bins)

    def curve(self) -> list[tuple[float, float, float]]:
        """(outcomes, mean prediction, share accepted) of each bin that has any."""
        self._take_in()
        return [(n, p / n, y / n) for n, p, y in self._sums.tolist() if n > 0.5]

    def error(self) -> float:
        """Expected calibration error: mean distance of prediction and outcome over the bins, by their outcomes."""
        self._take_in()
        total = self._sums[:, 0].sum()
        return float(np.abs(self._sums[:, 1] - self._sums[:, 2]).sum() / max(total, 1e-9))
