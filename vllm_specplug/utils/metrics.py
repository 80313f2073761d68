"""Counters of the plugin beside vLLM's own: the worker writes them, the process that serves ``/metrics`` reads them.

vLLM's messages between its processes cannot carry them, so both processes map a small file.  What vLLM counts itself
(drafts, drafted and accepted tokens, acceptance by depth) keeps vLLM's names.
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
    """One counter; its index in ``COUNTERS`` is its index in the file."""

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
    Counter("specplug:proof_failures", "Failed proofs at start: engines that decode plainly."),
)
_INDEX = {counter.reason or counter.name.removeprefix("specplug:"): index for index, counter in enumerate(COUNTERS)}
_SIZE = 8 * len(COUNTERS)


class Counters:
    """The file of counters, opened by path; without a path nothing is counted.

    Args:
        path: see ``publish``.
        replica: which data parallel replica counts here: several processes must not add to the same number.
    """

    def __init__(self, path: str | os.PathLike | None, replica: int = 0):
        self._map: mmap.mmap | None = None
        self._start = replica * _SIZE
        if path is not None and Path(path).exists():
            with open(path, "r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)

    def add(self, name: str, amount: float = 1.0) -> None:
        """Add to a counter; ``name`` is its reason, or its name without the prefix."""
        if self._map is not None and amount:
            offset = self._start + 8 * _INDEX[name]
            struct.pack_into("d", self._map, offset, struct.unpack_from("d", self._map, offset)[0] + amount)

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds that the block takes to a counter."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def values(self) -> list[float]:
        """Return all values, in the order of ``COUNTERS``, summed over the replicas."""
        if self._map is None:
            return [0.0] * len(COUNTERS)
        replicas = struct.iter_unpack(f"{len(COUNTERS)}d", self._map)
        return [sum(values) for values in zip(*replicas, strict=True)]


class CountersCollector(Collector):
    """Reports a file of counters to prometheus_client."""

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


def publish(replicas: int = 1) -> str:
    """Make a file of counters and show it in this process's ``/metrics``; it replaces an earlier one.

    Args:
        replicas: data parallel replicas that will count in it.

    Returns:
        The path of the file, for the worker.  Nothing of it is left when this process ends, however it ends.
    """
    global _shown
    path = _file_in_memory(_SIZE * replicas)
    if _shown is not None:
        REGISTRY.unregister(_shown)
    _shown = CountersCollector(Counters(path))
    REGISTRY.register(_shown)
    return path


def _file_in_memory(size: int) -> str:
    """Make a file without a name on any disk; where there is none (not on Linux), a temporary file."""
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("specplug-metrics")
        os.truncate(handle, size)
        return f"/proc/{os.getpid()}/fd/{handle}"
    handle, path = tempfile.mkstemp(prefix="specplug-metrics-")
    os.truncate(handle, size)
    os.close(handle)
    Finalize(None, lambda: Path(path).unlink(missing_ok=True), exitpriority=0)
    return path
