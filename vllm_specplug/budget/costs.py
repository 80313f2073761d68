"""What a step costs on this machine: seconds by rows and by requests, measured at start-up, refined while serving."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vllm_specplug.utils.files import replacing

logger = logging.getLogger("vllm_specplug")

#: Parts of a step, what their cost depends on, and seconds assumed where nothing is known.  Each is timed by itself and
#: they add up to the step: what one part takes must not look like a dearer row of another.
PARTS = {
    "verify": ("rows", 1e-2),  # the target's forward and its LM head, by rows of all requests
    "sample": ("requests", 2e-4),  # a plain step's sampling
    "tree": ("requests", 1e-3),  # in its place: staging, walk and commit of the trees
    "between": ("requests", 5e-4),  # the host, before and behind all these, and between the steps
    "host": ("rows", 1e-3),  # the host's drafter over the rows of a step (EAGLE's re-seeding, Medusa's heads)
    "level": ("rows", 1e-3),  # one further level of it
    "free": ("requests", 5e-4),  # proposers without a model of the host's
    "round": ("requests", 1e-3),  # what surrounds them in a round: learning, choosing, handing over
}

#: What else the seconds of a part depend on, and how uncertain that is beside its seconds at 1.  A forward attends to
#: the context of every further request, and a tree's attention and its nodes' are other ones than the host's: neither
#: must make all rows dearer.
TERMS = {"verify": {"requests": 0.02, "nodes": 0.02, "trees": 0.05}}

#: A part that runs is learned from about once in so many steps; one that was not for so many does not run at present.
USUAL, SELDOM = 16, 100
#: Of times that are learned from together, one so far above the others' median was disturbed.
DISTURBED = 2.0


class CostTable:
    """Seconds by a count, linear between knots; each observation moves what is near it most, and all of it somewhat.

    The knots' factors on the start are a Gaussian with a common part (another machine load, longer contexts) and a
    smooth one; it is updated by a Kalman filter whose uncertainty grows back slowly, so that it follows changes.

    Args:
        knots: increasing counts, from 1.
        seconds: at the knots; made non-decreasing.
        limit: largest count asked for.
        common, smooth: relative uncertainty of the start.
        is_guess: whether the start is no measurement: the first observations take its place.
        terms: by name, uncertainty of what one of these adds, beside the seconds at 1.
        per_term: seconds that one adds; 0 where nothing is known.
    """

    #: Relative error of one observation, that of the mean of ever so many (what slows the machine down lasts for more
    #: than one), and what the certainty gained loses per observation.
    NOISE, SHARED_NOISE, FORGETTING = 0.15, 0.03, 2e-3
    #: Of a part that was never measured so many observations come first, of which the least counts: what disturbs, or
    #: is done for the first time, only adds.
    FIRST_TIMES = 4

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
        #: Factors of the knots; behind them the terms, as shares of the seconds at 1.
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
        #: float64 ``[limit + 1]``: seconds by count; behind the last knot the last slope goes on.
        self.seconds = np.interp(self._counts, self.knots, seconds)
        if len(self.knots) > 1 and len(self._counts) > self.knots[-1]:
            slope = (seconds[-1] - seconds[-2]) / (self.knots[-1] - self.knots[-2])
            beyond = int(self.knots[-1])
            self.seconds[beyond:] = seconds[-1] + slope * (self._counts[beyond:] - beyond)
        self.seconds[0] = 0.0

    def knot_seconds(self) -> np.ndarray:
        """Seconds at the knots, as believed now."""
        return np.maximum.accumulate(self.start * self._state[: len(self.start)])

    @property
    def is_known(self) -> bool:
        """Whether the seconds were measured or observed."""
        return not self._is_guess or self.observations >= self.FIRST_TIMES

    def per_term(self) -> dict[str, float]:
        """Seconds that one of each term adds, as believed now."""
        return dict(zip(self._terms, (self.start[0] * self._state[len(self.start) :]).tolist(), strict=True))

    def at(self, count: float) -> float:
        """Seconds for a count, which may lie between two."""
        low = min(int(count), len(self.seconds) - 1)
        high = min(low + 1, len(self.seconds) - 1)
        return float(self.seconds[low] + (count - low) * (self.seconds[high] - self.seconds[low]))

    def scale(self, factor: float) -> None:
        """Everything takes so much longer now."""
        self._state *= factor
        self._refresh()

    def observe(self, count: float, seconds: float, elapsed: float = 1.0, num_times: int = 1, **terms: float) -> None:
        """Take in that ``count`` took ``seconds``; one far off (the machine was busy elsewhere) is pulled nearer.

        Args:
            count: rows or requests.
            seconds: what they took.
            elapsed: how much longer than usual nothing was observed; what was known is less certain by as much.
            num_times: all of these are means over so many times.
            terms: how many there were of each term.
        """
        if count < 1 or seconds <= 0:
            return
        right = int(np.clip(np.searchsorted(self.knots, count), 1, len(self.knots) - 1)) if len(self.knots) > 1 else 0
        hat = np.zeros_like(self._state)
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
        noise = max(self.NOISE / num_times**0.5, self.SHARED_NOISE)
        variance = float(hat @ spread) + (noise * expected) ** 2
        error = float(np.clip(seconds - expected, -2.0 * variance**0.5, 2.0 * variance**0.5))
        gain = spread / variance
        self._state += gain * error
        factors = self._state[: len(self.start)]
        np.maximum(factors, 0.02, out=factors)
        self._uncertainty -= np.outer(gain, spread)
        self.observations += 1
        self._refresh()

    def to_json(self) -> dict[str, Any]:
        counts, seconds = self.knots.astype(int).tolist(), self.knot_seconds().round(9).tolist()
        return {"counts": counts, "seconds": seconds} | ({"per_term": self.per_term()} if self._terms else {})


class CostModel:
    """The tables of one model on one machine.

    Args:
        measured: by part, seconds by count; parts left out start from a guess.
        limits: by unit (``rows``, ``requests``), the largest count asked for.
        per_term: by part, what its ``TERMS`` add.
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
            # Of what is only guessed it is not known either how it grows.
            known = {"smooth": 0.1 if part in measured else 0.4, "is_guess": part not in measured}
            terms = {"terms": TERMS.get(part), "per_term": (per_term or {}).get(part)}
            self.tables[part] = CostTable(points, points.values(), limits[unit], **known, **terms)
        #: By number of requests: the table's seconds, and what ``verification`` made of them.
        self._verification: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        #: By part: when it was observed last, and what the target's step over one row took then.
        self._last = {part: (0, self.pace) for part in self.tables}
        #: By part, kind and doubling of the count: when it was seen last, and times that are learned from together.
        self._gathered: dict[tuple[str, Any, int], tuple[int, list[tuple[float, ...]]]] = {}

    def __getitem__(self, part: str) -> CostTable:
        return self.tables[part]

    @property
    def pace(self) -> float:
        """Seconds of the target's forward over one row, which every step tells something of."""
        return self.tables["verify"].at(1)

    def gather(self, part: str, count: float, seconds: float, now: int, kind: Any, **terms: float) -> None:
        """Keep what a part took until there are ``USUAL`` times of its kind, then take in their mean.

        All of them together tell more than one in so many, and learning costs as much as from one.  What is seldom seen
        is taken in at once.

        Args:
            part, count, seconds, now, terms: of ``observe``.
            kind: of steps that may be averaged.
        """
        key = (part, kind, int(count).bit_length())  # a mean over few and many rows would lie beside the curve
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
        """Take in what a part took.

        Args:
            part: of ``PARTS``.
            count: its rows or requests.
            seconds: what they took.
            now: number of the step.
            num_times: all of these are means over so many times.
            terms: how many there were of each of its ``TERMS``.
        """
        before, _ = self._last[part]
        self.tables[part].observe(count, seconds, max((now - before) / USUAL, 1.0), num_times, **terms)
        self._last[part] = (now, self.pace)
        if part == "verify":
            self._follow(now)

    def _follow(self, now: int) -> None:
        """Whatever slows the target's steps down slows the rest: parts that do not run now go with them."""
        for part, (then, pace) in self._last.items():
            if now - then > SELDOM and part != "verify" and self.pace != pace:
                self.tables[part].scale(self.pace / pace)
                self._last[part] = (then, self.pace)

    def verification(self, num_reqs: int) -> np.ndarray:
        """Seconds of the target's forward over so many requests, by their nodes in all; with none, of a plain step."""
        table = self.tables["verify"]
        known, found = self._verification.get(num_reqs, (None, None))
        if known is not table.seconds:
            by_rows, per = table.seconds[min(num_reqs, len(table.seconds) - 1) :], table.per_term()
            nodes = np.arange(len(by_rows))
            found = by_rows + (num_reqs - 1) * per["requests"] + nodes * per["nodes"] + (nodes > 0) * per["trees"]
            self._verification[num_reqs] = (table.seconds, found)
        return found

    def to_json(self) -> dict[str, Any]:
        """What is known; a guess that was saved would come back as a measurement."""
        return {part: table.to_json() for part, table in self.tables.items() if table.is_known}

    @staticmethod
    def terms_in(saved: Mapping[str, Any]) -> dict[str, dict[str, float]]:
        """The constructor's ``per_term`` from ``to_json``'s result."""
        return {part: saved[part].get("per_term", {}) for part in TERMS if part in saved}

    @staticmethod
    def measured_in(saved: Mapping[str, Any]) -> dict[str, dict[int, float]]:
        """The first argument of the constructor from ``to_json``'s result."""
        return {
            part: dict(zip(saved[part]["counts"], saved[part]["seconds"], strict=True))
            for part in PARTS
            if part in saved
        }


def knots_up_to(limit: int) -> list[int]:
    """Counts to measure: all small ones, then about three per doubling."""
    knots = [1, 2, 3, 4, 6, 8, 12, 16, 17, 24, 32, 48, 64, 96, 128, 192, 256]
    return [knot for knot in knots if knot < limit] + [max(limit, 1)]


def fastest(
    run: Callable[[int], object], counts: Iterable[int], clock: Callable[[], float], sweeps: int, most_seconds: float
) -> dict[int, float]:
    """Seconds of the fastest run for each count: what disturbs only adds, and seldom hits the same count twice.

    Args:
        run: does what is timed, for a count.
        counts: the counts, from the smallest; those not reached in ``most_seconds`` are left out.
        clock: tells seconds.
        sweeps: runs of each count, if time allows.
        most_seconds: no run starts after so many.
    """
    best: dict[int, float] = {}
    begin = clock()
    for _ in range(sweeps):
        for count in counts:
            start = clock()
            if best and start - begin > most_seconds:
                return best
            run(count)
            best[count] = min(best.get(count, float("inf")), clock() - start)
    return best


def non_decreasing(values: np.ndarray) -> np.ndarray:
    """The nearest non-decreasing values (least squares): neighbours in the wrong order are averaged."""
    pools: list[list[float]] = []  # mean, how many
    for value in values.tolist():
        pools.append([value, 1])
        while len(pools) > 1 and pools[-2][0] >= pools[-1][0]:
            mean, count = pools.pop()
            pools[-1] = [(pools[-1][0] * pools[-1][1] + mean * count) / (pools[-1][1] + count), pools[-1][1] + count]
    return np.repeat([mean for mean, _ in pools], [int(count) for _, count in pools])


# ---- saved models


def folder() -> Path:
    """Where cost models are kept (``$XDG_CACHE_HOME`` is honoured)."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vllm-specplug" / "costs"


def path_of(facts: Mapping[str, Any]) -> Path:
    """The file of a model on a machine, both as ``facts`` tell them."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return folder() / f"{digest[:16]}.json"


def load(facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """What was saved for these facts; None where there is nothing, or nothing that can be read."""
    try:
        saved = json.loads(path_of(facts).read_text())
        seconds = saved["seconds"]
        CostModel(CostModel.measured_in(seconds), {"rows": 8, "requests": 8}, CostModel.terms_in(seconds))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("vllm-specplug: %s cannot be used and is measured anew: %s", path_of(facts), error)
        return None
    return saved


def save(facts: Mapping[str, Any], model: CostModel, **more: Any) -> Path | None:
    """Write a model; a server that cannot write goes on without."""
    path = path_of(facts)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps({"facts": dict(facts), "seconds": model.to_json(), **more}, default=str))
    except OSError as error:
        logger.warning("vllm-specplug: the cost model is not saved: %s", error)
        return None
    return path


def saved_models() -> list[dict[str, Any]]:
    """All models saved on this machine, newest first."""
    found = []
    for path in sorted(folder().glob("*.json"), key=lambda path: -path.stat().st_mtime):
        try:
            found.append(json.loads(path.read_text()))
        except (OSError, ValueError):
            continue
    return found
