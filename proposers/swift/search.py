"""Finding the layer set whose drafts agree best with the target, one scored window at a time (SWIFT, section 4.1).

Windows differ: one text is easier than the next.  So a candidate is compared with the set in use on the same window,
and takes its place only after it has been ahead on several windows.  The Gaussian process learns the same differences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .layer_set import LayerSet, num_choices

#: Optimism of the upper confidence bound, and candidates among which its best one is looked for.
KAPPA, CANDIDATES = 2.5, 512
#: Scored sets that the Gaussian process is fitted to: its cost grows with their cube.
MOST_POINTS = 200
#: Variance of one score, as a share of that of all.
NOISE = 0.3
#: Windows on which a candidate must be ahead in sum before it is used.
CONFIRMATIONS = 3
#: A random step changes up to so many choices of the set in use, unless it starts from nothing.
MOST_SWAPS = 4
#: Windows over which the matchness of the set in use is averaged.
MEMORY = 12
#: Behind the end of a search: a fall of the matchness by this much, or by this share of it, starts it again.
DRIFT, DRIFT_SHARE = 0.1, 1 / 3


@dataclass(frozen=True)
class SearchOptions:
    """How to search.

    Attributes:
        num_layers, skip_ratio: which sets there are.
        bayes_every: every so many steps the Gaussian process chooses the candidate, else chance (``beta``); 0: never.
        max_steps: candidates scored until the search ends (``S``).
        patience: the same, since the last gain.
        goal: matchness that is good enough.
        adapt: search again when the traffic has changed.
        fresh: share of the random steps that start from nothing.
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
    """A candidate that was ahead, and must be so again."""

    layer_set: LayerSet
    ahead: float
    windows: int
    last_window: Any


class LayerSearch:
    """The search of one stream of requests.

    ``next_set`` says what to score on a window, ``tell`` takes the score.  On each window the set in use comes first.
    """

    def __init__(self, options: SearchOptions, seed: int = 0, best: LayerSet | None = None):
        self.options = options
        self.best = best or LayerSet.uniform(options.num_layers, options.skip_ratio)
        #: Candidates scored: since the search began (anew), since the last gain, ever.
        self.steps = self.steps_since_gain = self.all_steps = 0
        self.restarts = 0
        self._bayesian_steps = 0
        self.stopped = ""
        #: Mean matchness of ``best`` over its last windows; None before the first.
        self.matchness: float | None = None
        #: ``(candidates scored so far, matchness, best)`` at every gain and every 10 windows.
        self.history: list[tuple[int, float, LayerSet]] = []
        self._windows = self._windows_scored = 0
        self._reference = 0.0
        self._level = 0.0
        self._points: dict[LayerSet, tuple[float, int]] = {}
        self._contender: _Contender | None = None
        self._window: Any = None
        self._base: float | None = None
        self._draw = np.random.default_rng(seed)

    # ---- what to score

    @property
    def wants_bayesian(self) -> bool:
        """Whether the Gaussian process is due to choose a candidate; chance may go before it meanwhile."""
        every = self.options.bayes_every
        return bool(every) and not self.stopped and self.steps // every > self._bayesian_steps and len(self._points) > 1

    def next_set(self, window: Any, bayesian: bool = True) -> LayerSet | None:
        """The set to score now.

        Args:
            window: names the window; equal names mean the same tokens.
            bayesian: whether there is time to ask the Gaussian process, which takes as long as some steps.

        Returns:
            None where nothing is to be learned from this window any more.
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
        swaps = int(self._draw.integers(1, MOST_SWAPS + 1))
        swaps = min(swaps, len(left_out), len(kept))
        vector[self._draw.choice(left_out, swaps, replace=False)] = 0.0
        vector[self._draw.choice(kept, swaps, replace=False)] = 1.0
        return LayerSet.from_vector(vector)

    def _bayesian(self) -> LayerSet:
        """The candidate with the highest upper confidence bound of a Gaussian process over the scored sets."""
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import RBF

        points = list(self._points.items())[-MOST_POINTS:]
        known = np.stack([layer_set.vector() for layer_set, _ in points])
        totals, counts = np.array([seen for _, seen in points]).T
        # Two sets drawn by chance are about half this far apart, so that the prior is nearly additive in the choices.
        # It stays as it is: fitting it too would take some hundred times as long as the rest.
        kernel = RBF(math.sqrt(known.shape[1]))
        process = GaussianProcessRegressor(kernel, alpha=NOISE / counts, optimizer=None, normalize_y=True)
        process.fit(known, totals / counts)
        candidates = [self._fresh() if i % 4 == 0 else self._near(self.best) for i in range(CANDIDATES)]
        mean, deviation = process.predict(np.stack([c.vector() for c in candidates]), return_std=True)
        return candidates[int((mean + KAPPA * deviation).argmax())]

    # ---- what was seen

    def tell(self, layer_set: LayerSet, matchness: float) -> bool:
        """Take in a score of the current window; says whether the set in use has changed."""
        if self._base is None:
            self._saw_best(matchness)
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

    def _saw_best(self, matchness: float) -> None:
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
            return False  # drawn again: the same window says the same
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
        """The traffic has changed: what was learned of other sets says little of it."""
        self.stopped = ""
        self.restarts += 1
        self.steps, self.steps_since_gain, self._bayesian_steps, self._level = 0, 0, 0, 0.0
        self._points.clear()
        self._contender = None

    # ---- across restarts of the server

    def to_json(self) -> dict[str, Any]:
        """All that is needed to go on later."""
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
            "points": [[_pair(s), total, count] for s, (total, count) in list(self._points.items())[-MOST_POINTS:]],
            "history": [[steps, matchness, _pair(s)] for steps, matchness, s in self.history],
        }

    @classmethod
    def from_json(cls, options: SearchOptions, saved: Mapping[str, Any], seed: int = 0) -> LayerSearch:
        """The inverse of ``to_json``.

        Raises:
            KeyError, TypeError, ValueError: not what ``to_json`` wrote, or of another number of layers.
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
