"""Counters of the V2 runner: times are taken on the device and read a few steps later, without synchronisation."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vllm_specplug.utils.metrics import Counters


class StepTimer:
    """Counts into the file of ``utils.metrics``.

    Args:
        metrics_file: the file; None counts nothing.
        device: where the work runs.
        replica: see ``Counters``.
    """

    def __init__(self, metrics_file: str | os.PathLike | None, device: torch.device, replica: int = 0):
        self._counters, self._on_cuda = Counters(metrics_file, replica), device.type == "cuda"
        self._began: torch.cuda.Event | float | None = None
        #: Counter and events of work that may still run.
        self._running: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()

    def add(self, name: str, amount: float = 1.0) -> None:
        self._counters.add(name, amount)

    def begin_step(self) -> None:
        """Start the time of a verification step."""
        self._began = self._now()

    def end_step(self) -> None:
        """End it: the step's trees were walked."""
        if self._began is not None:
            self.add("steps")
            self._end("verify_seconds", self._began)
            self._began = None

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds that the work of the block takes."""
        begin = self._now()
        try:
            yield
        finally:
            self._end(name, begin)

    def _now(self) -> torch.cuda.Event | float:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _end(self, name: str, begin: torch.cuda.Event | float) -> None:
        if not self._on_cuda:
            self.add(name, time.perf_counter() - begin)
            return
        self._running.append((name, begin, self._now()))
        while self._running and self._running[0][2].query():
            name, begin, end = self._running.popleft()
            self.add(name, begin.elapsed_time(end) / 1e3)
