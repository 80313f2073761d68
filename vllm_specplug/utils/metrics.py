"""Counters of the plugin beside the host's own: written by the worker, read by the process that serves ``/metrics``.

The host's messages between its processes have no room for them, so they live in a small file mapped by both.  What the
host counts already (drafts, drafted and accepted tokens, acceptance by depth) keeps the host's names.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector


@dataclass(frozen=True)
class Counter:
    """One counter: its place in the file is its place in ``COUNTERS``."""

    name: str
    help: str
    reason: str | None = None


_FALLBACKS = ("specplug:fallbacks", "Drafts that were left out or shortened, by reason, per request and step.")
COUNTERS = (
    Counter("specplug:draft_seconds", "Time spent drafting."),
    Counter("specplug:verify_seconds", "Time of verification: inputs, forward and walk."),
    Counter("specplug:steps", "Verification steps of the whole batch."),
    Counter(*_FALLBACKS, "proposer failed"),
    Counter(*_FALLBACKS, "turned off by the request"),
    Counter(*_FALLBACKS, "logprobs of the whole vocabulary"),
    Counter(*_FALLBACKS, "not read by the drafter"),
)
_INDEX = {counter.reason or counter.name.removeprefix("specplug:"): place for place, counter in enumerate(COUNTERS)}
_SIZE = 8 * len(COUNTERS)


class Counters:
    """The file of counters, opened by path; without one, counting costs nothing and goes nowhere."""

    def __init__(self, path: str | os.PathLike | None):
        self._map: mmap.mmap | None = None
        if path is not None and Path(path).exists():
            with open(path, "r+b") as file:
                self._map = mmap.mmap(file.fileno(), _SIZE)

    def add(self, name: str, amount: float = 1.0) -> None:
        """Add to a counter, named by its reason or its name without prefix."""
        if self._map is not None and amount:
            place = 8 * _INDEX[name]
            struct.pack_into("d", self._map, place, struct.unpack_from("d", self._map, place)[0] + amount)

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds that the block takes."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def values(self) -> list[float]:
        """All values, in the order of ``COUNTERS``."""
        return [0.0] * len(COUNTERS) if self._map is None else list(struct.unpack_from(f"{len(COUNTERS)}d", self._map))


class CountersCollector(Collector):
    """Shows a file of counters to prometheus_client."""

    def __init__(self, counters: Counters):
        self._counters = counters

    def collect(self) -> Iterator[CounterMetricFamily]:
        families: dict[str, CounterMetricFamily] = {}
        for counter, value in zip(COUNTERS, self._counters.values(), strict=True):
            labels = [] if counter.reason is None else ["reason"]
            family = families.setdefault(counter.name, CounterMetricFamily(counter.name, counter.help, labels=labels))
            family.add_metric([] if counter.reason is None else [counter.reason], value)
        yield from families.values()


_shown: CountersCollector | None = None


def publish() -> str:
    """Make a file of counters and show it in this process's ``/metrics``, in the place of an earlier one.

    Returns:
        Its path, for the worker; the file goes when this process ends.
    """
    global _shown
    handle, path = tempfile.mkstemp(prefix="specplug-metrics-")
    os.truncate(handle, _SIZE)
    os.close(handle)
    Finalize(None, lambda: Path(path).unlink(missing_ok=True), exitpriority=0)
    if _shown is not None:
        REGISTRY.unregister(_shown)
    _shown = CountersCollector(Counters(path))
    REGISTRY.register(_shown)
    return path
