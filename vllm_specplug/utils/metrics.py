"""Counters of the plugin beside vLLM's own: the worker writes them, the process that serves ``/metrics`` reads them.

vLLM's messages between its processes cannot carry them, so both processes map a small file.  What vLLM counts itself
(drafts, drafted and accepted tokens, acceptance by depth) keeps vLLM's names.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.registry import Collector

logger = logging.getLogger("vllm_specplug")


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
    Counter("specplug:drafters_taken", "Versions of the drafter that were taken while serving."),
    Counter("specplug:drafters_refused", "Published versions of the drafter that could not be taken."),
    Counter("specplug:drafters_rolled_back", "Versions of the drafter that were taken back."),
)
_INDEX = {counter.reason or counter.name.removeprefix("specplug:"): index for index, counter in enumerate(COUNTERS)}
#: Versions of the drafter that are counted: the newest ones.
_VERSIONS = 4
#: After the counters: the version in use, then version, verified trees and accepted tokens of each counted version.
_VERSIONS_START = 8 * len(COUNTERS)
#: Behind the versions: recent drafts, and those of them that helped.
_RECENT_START = _VERSIONS_START + 8 * (1 + 3 * _VERSIONS)
_SIZE = _RECENT_START + 8 * 2


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

    def serve_version(self, version: int) -> None:
        """Note the version of the drafter that is in use."""
        if self._map is not None:
            struct.pack_into("d", self._map, self._start + _VERSIONS_START, version)

    def add_trees(self, version: int, trees: int, accepted: int) -> None:
        """Add verified trees of a version of the drafter, and their accepted tokens."""
        if self._map is None:
            return
        offset = self._start + _VERSIONS_START + 8 * (1 + 3 * (version % _VERSIONS))
        known, all_trees, all_accepted = struct.unpack_from("3d", self._map, offset)
        if known != version:
            all_trees = all_accepted = 0.0
        struct.pack_into("3d", self._map, offset, version, all_trees + trees, all_accepted + accepted)

    def set_recent(self, drafts: float, helpful: float) -> None:
        """Note the number of recent drafts, and in how many of them the first token was accepted."""
        if self._map is not None:
            struct.pack_into("2d", self._map, self._start + _RECENT_START, drafts, helpful)

    def recent(self) -> tuple[float, float]:
        """Return what ``set_recent`` noted, summed over the replicas."""
        if self._map is None:
            return 0.0, 0.0
        found = [struct.unpack_from("2d", self._map, start + _RECENT_START) for start in self._replicas()]
        return sum(drafts for drafts, _ in found), sum(helpful for _, helpful in found)

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
        replicas = (struct.unpack_from(f"{len(COUNTERS)}d", self._map, start) for start in self._replicas())
        return [sum(values) for values in zip(*replicas, strict=True)]

    def versions(self) -> tuple[int, dict[int, tuple[float, float]]]:
        """Return the newest version in use (0: none is counted); by version, verified trees and accepted tokens."""
        current = 0
        found: dict[int, tuple[float, float]] = {}
        if self._map is None:
            return current, found
        for start in self._replicas():
            values = struct.unpack_from(f"{1 + 3 * _VERSIONS}d", self._map, start + _VERSIONS_START)
            current = max(current, int(values[0]))
            for place in range(1, len(values), 3):
                version, trees, accepted = values[place : place + 3]
                if version:
                    known = found.get(int(version), (0.0, 0.0))
                    found[int(version)] = (known[0] + trees, known[1] + accepted)
        return current, dict(sorted(found.items()))

    def _replicas(self) -> range:
        return range(0, len(self._map) if self._map is not None else 0, _SIZE)


class CountersCollector(Collector):
    """Reports a file of counters to prometheus_client."""

    def __init__(self, counters: Counters):
        self._counters = counters

    @property
    def has_counts(self) -> bool:
        return any(self._counters.values()) or self._counters.versions()[0] > 0

    def collect(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily] = {}
        for counter, value in zip(COUNTERS, self._counters.values(), strict=True):
            labels = [] if counter.reason is None else ["reason"]
            family = families.setdefault(counter.name, CounterMetricFamily(counter.name, counter.help, labels=labels))
            family.add_metric([] if counter.reason is None else [counter.reason], value)
        yield from families.values()
        drafts, helpful = self._counters.recent()
        if drafts:
            text = "Share of recent drafts (the last 500 to 1000 of a replica) whose first token was accepted."
            yield GaugeMetricFamily("specplug:first_token_acceptance", text, helpful / drafts)
        current, versions = self._counters.versions()
        if current:
            yield GaugeMetricFamily("specplug:drafter_version", "Version of the drafter in use.", current)
            trees = CounterMetricFamily("specplug:drafter_trees", "Verified trees, by version.", labels=["version"])
            tokens = CounterMetricFamily(
                "specplug:drafter_accepted_tokens", "Accepted tokens of verified trees, by version.", labels=["version"]
            )
            for version, (num_trees, accepted) in versions.items():
                trees.add_metric([str(version)], num_trees)
                tokens.add_metric([str(version)], accepted)
            yield from (trees, tokens)


#: Seconds from one copy of the counters to the next, where several API servers show them.
COPY_SECONDS = 1.0


class _SharedMetrics(threading.Thread):
    """Copies the counters to prometheus_client's folder of several processes.

    With several API servers (``vllm serve --data-parallel-size 2``) vLLM shows only the files in that folder.  The
    servers make counters of their own, in which nobody counts: those stay out.
    """

    def __init__(self, folder: str):
        super().__init__(name="specplug-metrics", daemon=True)
        self.folder = folder

    def run(self) -> None:
        files: dict[str, MmapedDict] = {}
        while True:
            time.sleep(COPY_SECONDS)
            if _shown is not None and _shown.has_counts:
                try:
                    self._copy(_shown, files)
                except OSError as error:  # vLLM removes the folder at its end
                    logger.debug("counters are not copied any more to %s: %s", self.folder, error)
                    return

    def _copy(self, collector: CountersCollector, files: dict[str, MmapedDict]) -> None:
        for family in collector.collect():
            kind = "gauge_mostrecent" if family.type == "gauge" else family.type
            if kind not in files:
                files[kind] = MmapedDict(os.path.join(self.folder, f"{kind}_specplug-{os.getpid()}.db"))
            for sample in family.samples:
                labels = list(sample.labels), list(sample.labels.values())
                key = mmap_key(family.name, sample.name, *labels, family.documentation)
                files[kind].write_value(key, sample.value, time.time())


_shown: CountersCollector | None = None
_shared: _SharedMetrics | None = None


def publish(replicas: int = 1) -> str:
    """Make a file of counters and show it in this process's ``/metrics``; it replaces an earlier one.

    Args:
        replicas: data parallel replicas that will count in it.

    Returns:
        The path of the file, for the worker.  Nothing of it is left when this process ends, however it ends.
    """
    global _shown, _shared
    path = _file_in_memory(_SIZE * replicas)
    if _shown is not None:
        REGISTRY.unregister(_shown)
    _shown = CountersCollector(Counters(path))
    REGISTRY.register(_shown)
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if folder and (_shared is None or _shared.folder != folder):
        _shared = _SharedMetrics(folder)
        _shared.start()
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
