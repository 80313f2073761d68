"""Models the seconds of a step's parts on this machine: measured at start-up, updated while serving."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

#: Parts of a step: what their seconds depend on, and the seconds assumed while nothing is known.  Each part is timed by
#: itself and together they make up the step, so that the time of one part is not taken for that of another's rows.  The
#: assumed seconds are of the order seen with SmolLM2-135M on two CPU cores; the first observations replace them.
PARTS = {
    "verify": ("rows", 1e-2),  # the target's forward and its LM head, by rows of all requests
    "sample": ("requests", 2e-4),  # the sampling of a plain step
    "tree": ("requests", 1e-3),  # in its place where there are trees: their staging, walk and commit
    "between_steps": ("requests", 5e-4),  # vLLM's own work around these parts, and the time from step to step
    "first_pass": (
        "rows",
        1e-3,
    ),  # the model drafter's first forward (EAGLE's re-seeding), or all of it (Medusa, SWIFT)
    "level": ("rows", 1e-3),  # one further level of it
    "model_free": ("requests", 5e-4),  # the model-free proposers
    "draft_overhead": ("requests", 1e-3),  # the rest of a draft phase: learning, selecting, passing the drafts on
}

#: What else the seconds of a part depend on, and how uncertain one of these is, as a share of the part's seconds at 1.
#: Each request after the first has a context to attend to, and a tree's attention is not vLLM's.  Without these terms
#: rows looked twice as expensive as they are (commit a7c6532).  The shares are chosen by hand; not swept.
TERMS = {"verify": {"requests": 0.02, "nodes": 0.02, "trees": 0.05}}

#: A part that runs is learned from about once in so many steps, by the mean of their times, since learning costs time.
#: By one time in 16 instead of the mean, a plain step of 8 requests was estimated 12% too fast (not in the
#: repository).  The number is chosen by hand; not swept.
USUAL = 16
#: A part that was not seen for so many steps does not run at present.  As many as lie between two plain steps among
#: steps that draft (``planner.PLAIN_EVERY``).
SELDOM = 100
#: Times above so many medians are left out of a mean: something else ran.  Chosen by hand; not swept.
DISTURBED = 2.0


class CostTable:
    """Estimates seconds by a count, linearly between knots.

    The state is a factor on the start value of each knot, a Gaussian whose covariance has a common part (machine load,
    longer contexts) and a part that falls with the distance of the knots.  So an observation changes the knots near it
    most, and all others a little.  A Kalman filter updates it; its uncertainty grows back slowly, to follow changes.

    Args:
        knots: increasing counts, from 1.
        seconds: at the knots; made non-decreasing.
        limit: largest count that is queried.
        common, smooth: relative uncertainty of the start, of the two parts.
        is_guess: whether the start was not measured: the first observations replace it.
        terms: by name, uncertainty of what one of each term adds, as a share of the seconds at 1.
        per_term: by name, seconds that one of each term adds; 0 if left out.

    Attributes:
        seconds: float64 ``[limit + 1]``; the estimate by count.
        observations: how many there were.
    """

    #: Relative error of one observation.  Chosen by hand; not swept.
    NOISE = 0.15
    #: Relative error of the mean of any number of observations: what slows the machine down lasts for more than one.
    #: Chosen by hand; not swept.
    SHARED_NOISE = 0.03
    #: Share of the certainty that is lost with each observation.  Chosen by hand; not swept.
    FORGETTING = 2e-3
    #: Of so many first observations of a guessed part the smallest counts: disturbances, and what is done for the first
    #: time, only add.  Chosen by hand; not swept.
    FIRST_TIMES = 4
    #: Largest deviation of an observation that counts, in standard deviations.  Chosen by hand; not swept.
    MOST_DEVIATIONS = 2.0
    #: Smallest factor of a knot, so that seconds stay positive.  Chosen by hand; not swept.
    LEAST_FACTOR = 0.02

    def __init__(
        self,
        knots: Iterable[int],
        seconds: Iterable[float],
        limit: int,
        common: float = 0.3,
        smooth: float = 0.1,
        *,
        is_guess: bool = False,
        terms: Mapping[str, float] | None = None,
        per_term: Mapping[str, float] | None = None,
    ):
        self.knots = np.asarray(list(knots), dtype=np.float64)
        self.start = non_decreasing(np.maximum(np.asarray(list(seconds), dtype=np.float64), 1e-7))
        if len(self.knots) != len(self.start) or (np.diff(self.knots) <= 0).any() or self.knots[0] != 1:
            raise ValueError("a cost table needs increasing counts from 1, and seconds for each")
        distance = np.abs(np.subtract.outer(np.log2(self.knots), np.log2(self.knots)))
        self._terms = list(terms or ())
        #: float64 ``[knots + terms]``; the knots' factors, then what one of each term adds, as a share of the seconds
        #: at 1.
        count, size = len(self.knots), len(self.knots) + len(self._terms)
        self._state = np.ones(size)
        self._state[count:] = [(per_term or {}).get(name, 0.0) / self.start[0] for name in self._terms]
        self._is_guess = is_guess
        self._prior = np.zeros((size, size))
        self._prior[:count, :count] = common**2 + smooth**2 * np.exp(-distance / 2)
        self._prior[range(count, size), range(count, size)] = np.square(list((terms or {}).values()))
        self._uncertainty = self._prior.copy()
        self.observations = 0
        self._counts = np.arange(limit + 1, dtype=np.float64)
        self._refresh()

    def _refresh(self) -> None:
        seconds = self.knot_seconds()
        self.seconds = np.interp(self._counts, self.knots, seconds)
        if len(self.knots) > 1 and len(self._counts) > self.knots[-1]:
            # Counts above the last knot follow the last slope.
            slope = (seconds[-1] - seconds[-2]) / (self.knots[-1] - self.knots[-2])
            beyond = int(self.knots[-1])
            self.seconds[beyond:] = seconds[-1] + slope * (self._counts[beyond:] - beyond)
        self.seconds[0] = 0.0

    def knot_seconds(self) -> np.ndarray:
        """Return the estimated seconds at the knots."""
        return np.maximum.accumulate(self.start * self._state[: len(self.start)])

    @property
    def is_known(self) -> bool:
        """Whether the seconds were measured or observed, not just guessed."""
        return not self._is_guess or self.observations >= self.FIRST_TIMES

    def per_term(self) -> dict[str, float]:
        """Return the estimated seconds that one of each term adds."""
        return dict(zip(self._terms, (self.start[0] * self._state[len(self.start) :]).tolist(), strict=True))

    def at(self, count: float) -> float:
        """Return the seconds for a count, which may be fractional."""
        low = min(int(count), len(self.seconds) - 1)
        high = min(low + 1, len(self.seconds) - 1)
        return float(self.seconds[low] + (count - low) * (self.seconds[high] - self.seconds[low]))

    def scale(self, factor: float) -> None:
        """Multiply all seconds."""
        self._state *= factor
        self._refresh()

    def observe(self, count: float, seconds: float, elapsed: float = 1.0, num_times: int = 1, **terms: float) -> None:
        """Update the estimate by an observation; one far from it counts as a nearer one.

        Args:
            count: rows or requests.
            seconds: the time that they took.
            elapsed: time since the last observation, in usual intervals; the uncertainty grows by as much.
            num_times: ``count``, ``seconds`` and ``terms`` are means over so many times.
            terms: by name, how many there were of each term.
        """
        if count < 1 or seconds <= 0:
            return
        right = int(np.clip(np.searchsorted(self.knots, count), 1, len(self.knots) - 1)) if len(self.knots) > 1 else 0
        hat = np.zeros_like(self._state)  # the observed seconds are hat @ state
        hat[len(self.start) :] = [self.start[0] * terms.get(name, 0.0) for name in self._terms]
        if right:
            share = (count - self.knots[right - 1]) / (self.knots[right] - self.knots[right - 1])
            hat[right - 1], hat[right] = (1 - share) * self.start[right - 1], share * self.start[right]
        else:
            hat[0] = self.start[0]
        self._uncertainty += min(self.FORGETTING * elapsed, 1.0) * (self._prior - self._uncertainty)
        expected = float(hat @ self._state)
        if self._is_guess and self.observations < self.FIRST_TIMES:
            self.scale(seconds / expected if self.observations == 0 else min(seconds / expected, 1.0))
            self.observations += 1
            return
        spread = self._uncertainty @ hat
        variance = float(hat @ spread) + self._noise(expected, num_times) ** 2
        most = self.MOST_DEVIATIONS * variance**0.5
        error = float(np.clip(seconds - expected, -most, most))
        gain = spread / variance
        self._state += gain * error
        factors = self._state[: len(self.start)]
        np.maximum(factors, self.LEAST_FACTOR, out=factors)
        self._uncertainty -= np.outer(gain, spread)
        self.observations += 1
        self._refresh()

    def _noise(self, expected: float, num_times: int) -> float:
        """Return the standard error of the mean of so many observations."""
        return max(self.NOISE / num_times**0.5, self.SHARED_NOISE) * expected

    def to_json(self) -> dict[str, Any]:
        counts, seconds = self.knots.astype(int).tolist(), self.knot_seconds().round(9).tolist()
        return {"counts": counts, "seconds": seconds} | ({"per_term": self.per_term()} if self._terms else {})


class CostModel:
    """The cost tables of one model on one machine.

    Args:
        measured: by part, seconds by count; parts left out start from a guess.
        limits: by unit (``rows``, ``requests``), the largest count that is queried.
        per_term: by part, seconds that one of each of its ``TERMS`` adds.

    Attributes:
        tables: by part.
    """

    def __init__(
        self,
        measured: Mapping[str, Mapping[int, float]],
        limits: Mapping[str, int],
        per_term: Mapping[str, Mapping[str, float]] | None = None,
    ):
        self.tables: dict[str, CostTable] = {}
        for part, (unit, guess) in PARTS.items():
            points = dict(sorted(measured.get(part, {}).items())) or {1: guess, max(limits[unit], 2): guess}
            # How a guessed part grows with its count is unknown too.
            known = {"smooth": 0.1 if part in measured else 0.4, "is_guess": part not in measured}
            terms = {"terms": TERMS.get(part), "per_term": (per_term or {}).get(part)}
            self.tables[part] = CostTable(points, points.values(), limits[unit], **known, **terms)
        #: By number of requests: the table's seconds, and the result of ``verification`` for them.
        self._verification: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        #: By part: the step of its last observation, and ``pace`` at that time.
        self._last = {part: (0, self.pace) for part in self.tables}
        #: By part, kind of step and bit length of the count: the step of the last time, and times to be averaged.
        self._gathered: dict[tuple[str, Any, int], tuple[int, list[tuple[float, ...]]]] = {}

    def __getitem__(self, part: str) -> CostTable:
        return self.tables[part]

    @property
    def pace(self) -> float:
        """Seconds of the target's forward over one row; every step updates it."""
        return self.tables["verify"].at(1)

    def gather(self, part: str, count: float, seconds: float, now: int, kind: Any, **terms: float) -> None:
        """Collect the times of a part, and observe their mean once there are ``USUAL`` of one kind.

        A mean says more than one time in 16, and learning from it costs as much.  A kind that is seldom seen is
        observed at once.

        Args:
            part, count, seconds, now, terms: see ``observe``.
            kind: steps of one kind may be averaged; hashable.
        """
        key = (part, kind, int(count).bit_length())  # seconds need not be linear from few to many rows
        before, times = self._gathered.get(key, (now, []))
        if now - before > SELDOM:
            self._gathered[key] = (now, [])
            self.observe(part, count, seconds, now, **terms)
            return
        times.append((count, seconds, *terms.values()))
        self._gathered[key] = (now, times)
        if len(times) < USUAL:
            return
        self._gathered[key] = (now, [])
        values = np.array(times)
        values = values[values[:, 1] <= DISTURBED * np.median(values[:, 1])]
        count, seconds, *of_terms = values.mean(axis=0).tolist()
        self.observe(part, count, seconds, now, num_times=len(values), **dict(zip(terms, of_terms, strict=True)))

    def observe(self, part: str, count: float, seconds: float, now: int, num_times: int = 1, **terms: float) -> None:
        """Update the table of a part by an observation.

        Args:
            part: of ``PARTS``.
            count: its rows or requests.
            seconds: the time that they took.
            now: number of the step.
            num_times: ``count``, ``seconds`` and ``terms`` are means over so many times.
            terms: by name, how many there were of each of its ``TERMS``.
        """
        before, _ = self._last[part]
        self.tables[part].observe(count, seconds, max((now - before) / USUAL, 1.0), num_times, **terms)
        self._last[part] = (now, self.pace)
        if part == "verify":
            self._follow(now)

    def _follow(self, now: int) -> None:
        """Scale parts that do not run at present with ``pace``: what slows the target slows them too."""
        for part, (then, pace) in self._last.items():
            if now - then > SELDOM and part != "verify" and self.pace != pace:
                self.tables[part].scale(self.pace / pace)
                self._last[part] = (then, self.pace)

    def verification(self, num_reqs: int) -> np.ndarray:
        """Return the seconds of the target's forward over ``num_reqs`` requests.

        Returns:
            float64 ``[n]``, by the number of nodes of all requests; entry 0 is a plain forward.
        """
        table = self.tables["verify"]
        known, found = self._verification.get(num_reqs, (None, None))
        if known is not table.seconds:
            by_rows, per = table.seconds[min(num_reqs, len(table.seconds) - 1) :], table.per_term()
            nodes = np.arange(len(by_rows))
            found = by_rows + (num_reqs - 1) * per["requests"] + nodes * per["nodes"] + (nodes > 0) * per["trees"]
            self._verification[num_reqs] = (table.seconds, found)
        return found

    def plain_step(self, num_reqs: int) -> float:
        """Return the seconds of a step without nodes."""
        fixed = self["between_steps"].at(num_reqs)
        return fixed + float(self.verification(num_reqs)[0]) + self["sample"].at(num_reqs)

    def to_json(self) -> dict[str, Any]:
        """Return the tables by part, without guesses: read again, a guess would be taken for a measurement."""
        return {part: table.to_json() for part, table in self.tables.items() if table.is_known}

    @staticmethod
    def terms_in(saved: Mapping[str, Any]) -> dict[str, dict[str, float]]:
        """Return the constructor's ``per_term`` from the result of ``to_json``."""
        return {part: saved[part].get("per_term", {}) for part in TERMS if part in saved}

    @staticmethod
    def measured_in(saved: Mapping[str, Any]) -> dict[str, dict[int, float]]:
        """Return the constructor's ``measured`` from the result of ``to_json``."""
        return {
            part: dict(zip(saved[part]["counts"], saved[part]["seconds"], strict=True))
            for part in PARTS
            if part in saved
        }


def non_decreasing(values: np.ndarray) -> np.ndarray:
    """The nearest non-decreasing values (least squares): neighbours in the wrong order are averaged."""
    pools: list[list[float]] = []  # mean, how many
    for value in values.tolist():
        pools.append([value, 1])
        while len(pools) > 1 and pools[-2][0] >= pools[-1][0]:
            mean, count = pools.pop()
            pools[-1] = [(pools[-1][0] * pools[-1][1] + mean * count) / (pools[-1][1] + count), pools[-1][1] + count]
    return np.repeat([mean for mean, _ in pools], [int(count) for _, count in pools])
