"""Search for the layer set whose drafts agree best with the target, one scored window at a time (SWIFT, section 4.1).

A window is the last tokens of an answer; matchness is the share of them that the target predicts with a layer set
skipped.  Some texts are easier than others.  So a candidate is compared with the set in use on the same window, and
replaces it only after it was better in sum over several windows.  The Gaussian process learns the same differences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .layer_set import LayerSet, num_choices

#: Weight of the deviation in the upper confidence bound, and number of random candidates of which the best is taken.
KAPPA, CANDIDATES = 2.5, 512
#: Most scored sets that the Gaussian process is fitted to: the cost grows with the cube of their number.
MAX_POINTS = 200
#: Noise variance of one score, relative to the variance of all scores.
NOISE = 0.3
#: Number of windows over which a candidate must be better in sum before it is used.
CONFIRMATIONS = 3
#: Most sub-layers that a random step swaps in the set in use.
MAX_SWAPS = 4
#: Number of windows over which the matchness of the set in use is averaged.
MEMORY = 12
#: After the end of a search, a fall of the matchness by this amount, or by this share of it, starts a new search.
DRIFT, DRIFT_SHARE = 0.1, 1 / 3


@dataclass(frozen=True)
class SearchOptions:
    """Options of the search.

    Attributes:
        num_layers, skip_ratio: layers of the target, and share of their sub-layers to skip.
        bayes_every: the Gaussian process selects one candidate in so many (``beta``), the others are random; 0: never.
        max_steps: the search ends after this many scored candidates (``S``).
        patience: the search ends after this many scored candidates without a gain.
        goal: the search ends when the matchness exceeds this.
        adapt: search again when the traffic has changed.
        fresh: share of the random candidates that are drawn independently of the set in use.
    """

    num_layers: int
    skip_ratio: float
    bayes_every: int = 25
    max_steps: int = 1000
    patience: int = 300
    goal: float = 0.95
    adapt: bool = True
    fresh: float = 0.25


@dataclass
class _Contender:
    """A candidate that was better than the set in use on ``windows`` windows, by ``ahead`` in sum."""

    layer_set: LayerSet
    ahead: float
    windows: int
    last_window: Any


def predict_scores(
    known: np.ndarray, scores: np.ndarray, noise: np.ndarray, wanted: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the standard deviation of a Gaussian process for the scores of layer sets.

    The squared distance of two random sets is about half the squared length scale, so the prior is nearly additive in
    the sub-layers.  The length scale is not fitted: that takes about 100 times as long as the rest.

    Args:
        known: [num_known, num_sub_layers], 0 or 1, the scored sets.
        scores: [num_known].
        noise: [num_known], the variance of each score in units of the variance of all.
        wanted: [num_wanted, num_sub_layers], 0 or 1.

    Returns:
        mean, deviation: [num_wanted] each, in the unit of the scores.
    """
    # Above 0: among equal scores the deviation decides, and not how they are rounded.
    level, spread = scores.mean(), max(scores.std(), 1e-9)
    across = _covariance(known, wanted)
    weights = np.linalg.solve(_covariance(known, known) + np.diag(noise), across)
    mean = level + (scores - level) @ weights
    variance = 1.0 - (across * weights).sum(axis=0)
    return mean, spread * np.sqrt(np.maximum(variance, 0.0))


def _covariance(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    different = one.sum(axis=1)[:, None] + other.sum(axis=1) - 2 * one @ other.T
    return np.exp(-different / (2 * one.shape[1]))


class LayerSearch:
    """The search for one target.

    ``next_set`` returns the set to score on a window; ``add`` receives its score.  On each window, the set in use is
    scored first.
    """

    def __init__(self, options: SearchOptions, seed: int = 0, best: LayerSet | None = None):
        self.options = options
        self.best = best or LayerSet.uniform(options.num_layers, options.skip_ratio)
        #: Scored candidates: since the search last started, since the last gain, and in total.
        self.steps = self.steps_since_gain = self.all_steps = 0
        self.restarts = 0
        self._bayesian_steps = 0
        self.stopped = ""
        #: Mean matchness of ``best`` over its last windows; None before the first window.
        self.matchness: float | None = None
        #: ``(candidates scored so far, matchness, best)`` at every gain and every 10 windows.
        self.history: list[tuple[int, float, LayerSet]] = []
        #: Windows of the set in use, and of all sets so far.
        self._windows = self._windows_scored = 0
        #: Matchness at the end of the search, with which later windows are compared.
        self._reference = 0.0
        #: Sum of all gains: scores of the Gaussian process are relative to the first set.
        self._level = 0.0
        self._points: dict[LayerSet, tuple[float, int]] = {}
        self._contender: _Contender | None = None
        #: The current window, and the score of the set in use on it.
        self._window: Any = None
        self._base: float | None = None
        self._draw = np.random.default_rng(seed)

    @property
    def wants_bayesian(self) -> bool:
        """Whether a candidate of the Gaussian process is due; random candidates may still come before it."""
        every = self.options.bayes_every
        return bool(every) and not self.stopped and self.steps // every > self._bayesian_steps and len(self._points) > 1

    def next_set(self, window: Any, bayesian: bool = True) -> LayerSet | None:
        """Return the set to score now.

        Args:
            window: identifies the window; equal values mean the same tokens.
            bayesian: whether there is time to fit the Gaussian process, which takes as long as some steps.

        Returns:
            None if the search has ended and the set in use has been scored on this window.
        """
        if window != self._window or self._base is None:
            self._window, self._base = window, None
            return self.best
        if self.stopped:
            return None
        contender = self._contender
        if contender is not None and contender.last_window != window:
            return contender.layer_set
        if bayesian and self.wants_bayesian:
            self._bayesian_steps = self.steps // self.options.bayes_every
            return self._bayesian()
        return self._random()

    def _random(self) -> LayerSet:
        return self._fresh() if self._draw.random() < self.options.fresh else self._near(self.best)

    def _fresh(self) -> LayerSet:
        vector = np.zeros(2 * (self.options.num_layers - 2))
        count = num_choices(self.options.num_layers, self.options.skip_ratio)
        vector[self._draw.choice(len(vector), count, replace=False)] = 1.0
        return LayerSet.from_vector(vector)

    def _near(self, layer_set: LayerSet) -> LayerSet:
        vector = layer_set.vector()
        left_out, kept = np.flatnonzero(vector == 1), np.flatnonzero(vector == 0)
        swaps = int(self._draw.integers(1, MAX_SWAPS + 1))
        swaps = min(swaps, len(left_out), len(kept))
        vector[self._draw.choice(left_out, swaps, replace=False)] = 0.0
        vector[self._draw.choice(kept, swaps, replace=False)] = 1.0
        return LayerSet.from_vector(vector)

    def _bayesian(self) -> LayerSet:
        """Return the candidate with the highest upper confidence bound, by a Gaussian process over the scored sets."""
        points = list(self._points.items())[-MAX_POINTS:]
        known = np.stack([layer_set.vector() for layer_set, _ in points])
        totals, counts = np.array([seen for _, seen in points]).T
        candidates = [self._fresh() if i % 4 == 0 else self._near(self.best) for i in range(CANDIDATES)]
        wanted = np.stack([candidate.vector() for candidate in candidates])
        mean, deviation = predict_scores(known, totals / counts, NOISE / counts, wanted)
        return candidates[int((mean + KAPPA * deviation).argmax())]

    def add(self, layer_set: LayerSet, matchness: float) -> bool:
        """Add the score of a set on the current window; return whether the set in use has changed."""
        if self._base is None:
            self._add_base_score(matchness)
            return False
        self.steps += 1
        self.steps_since_gain += 1
        self.all_steps += 1
        ahead = matchness - self._base
        total, count = self._points.pop(layer_set, (0.0, 0))
        self._points[layer_set] = (total + self._level + ahead, count + 1)
        gained = self._race(layer_set, ahead)
        options = self.options
        if self.steps >= options.max_steps:
            self._stop(f"{options.max_steps} steps")
        elif self.steps_since_gain >= options.patience:
            self._stop(f"{options.patience} steps without gain")
        return gained

    def _add_base_score(self, matchness: float) -> None:
        self._base = matchness
        self._windows += 1
        weight = 1 / min(self._windows, MEMORY)
        self.matchness = matchness if self.matchness is None else self.matchness + weight * (matchness - self.matchness)
        self._windows_scored += 1
        if self._windows_scored % 10 == 1:
            self.history.append((self.all_steps, self.matchness, self.best))
        if self.stopped:
            lowest = self._reference - min(DRIFT, DRIFT_SHARE * self._reference)
            if self.options.adapt and self._windows >= CONFIRMATIONS and self.matchness < lowest:
                self._start_again()
            return
        if self._windows >= CONFIRMATIONS and self.matchness > self.options.goal:
            self._stop(f"matchness above {self.options.goal}")

    def _race(self, layer_set: LayerSet, ahead: float) -> bool:
        contender = self._contender
        if contender is not None and contender.last_window == self._window and contender.layer_set == layer_set:
            return False  # drawn again: the same window gives the same score
        if contender is None or contender.layer_set != layer_set:
            if ahead > 0 and (contender is None or (contender.windows == 1 and ahead > contender.ahead)):
                self._contender = _Contender(layer_set, ahead, 1, self._window)
            return False
        contender.ahead += ahead
        contender.windows += 1
        contender.last_window = self._window
        if contender.ahead <= 0:
            self._contender = None
        if contender.ahead <= 0 or contender.windows < CONFIRMATIONS:
            return False
        gain = contender.ahead / contender.windows
        self.best, self._contender = layer_set, None
        self._level += gain
        assert self.matchness is not None
        self.matchness = min(self.matchness + gain, 1.0)
        self._windows, self._base = 1, None
        self.steps_since_gain = 0
        self.history.append((self.all_steps, self.matchness, self.best))
        return True

    def _stop(self, reason: str) -> None:
        self.stopped = reason
        self._reference = self.matchness or 0.0
        self.history.append((self.all_steps, self._reference, self.best))

    def _start_again(self) -> None:
        """Start a new search: scores of earlier traffic say little about the present traffic."""
        self.stopped = ""
        self.restarts += 1
        self.steps, self.steps_since_gain, self._bayesian_steps, self._level = 0, 0, 0, 0.0
        self._points.clear()
        self._contender = None

    def to_json(self) -> dict[str, Any]:
        """Return all that ``from_json`` needs to continue the search."""
        return {
            "best": _pair(self.best),
            "steps": self.steps,
            "steps_since_gain": self.steps_since_gain,
            "all_steps": self.all_steps,
            "restarts": self.restarts,
            "stopped": self.stopped,
            "matchness": self.matchness,
            "windows": self._windows_scored,
            "reference": self._reference,
            "level": self._level,
            "points": [[_pair(s), total, count] for s, (total, count) in list(self._points.items())[-MAX_POINTS:]],
            "history": [[steps, matchness, _pair(s)] for steps, matchness, s in self.history],
        }

    @classmethod
    def from_json(cls, options: SearchOptions, saved: Mapping[str, Any], seed: int = 0) -> LayerSearch:
        """Continue a search saved by ``to_json``.

        Raises:
            KeyError, TypeError, ValueError: ``saved`` is damaged, or of a target with another number of layers.
        """

        def read(pair: Any) -> LayerSet:
            return LayerSet(options.num_layers, tuple(pair[0]), tuple(pair[1]))

        search = cls(options, seed + int(saved["all_steps"]), read(saved["best"]))
        search.steps, search.steps_since_gain = int(saved["steps"]), int(saved["steps_since_gain"])
        search.all_steps = int(saved["all_steps"])
        search._bayesian_steps = search.steps // max(options.bayes_every, 1)
        search.restarts, search.stopped = int(saved["restarts"]), str(saved["stopped"])
        search.matchness = None if saved["matchness"] is None else float(saved["matchness"])
        search._windows_scored = int(saved["windows"])
        search._windows = min(search._windows_scored, MEMORY)
        search._reference, search._level = float(saved["reference"]), float(saved["level"])
        search._points = {read(pair): (float(total), int(count)) for pair, total, count in saved["points"]}
        search.history = [(int(steps), float(matchness), read(pair)) for steps, matchness, pair in saved["history"]]
        return search


def _pair(layer_set: LayerSet) -> list[list[int]]:
    return [list(layer_set.attention), list(layer_set.mlp)]
