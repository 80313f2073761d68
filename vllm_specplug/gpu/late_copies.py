"""Copies from the device that nothing waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

import torch

Copies = TypeVar("Copies")


def start_copy(values: torch.Tensor) -> torch.Tensor:
    """Start a copy to CPU memory; on CUDA it is pinned, so that nothing waits for the copy."""
    return values.to("cpu", non_blocking=True, copy=True)


class LateCopies(Generic[Copies]):
    """Hands out copies in the order in which they were started, once they have arrived.

    Args:
        device: from which they are copied.
        lag: None: hand out whatever has arrived; else wait for all but the newest ``lag``.  Tensor-parallel ranks need
            a number, so that the same copies arrive before the same step on all of them.
    """

    def __init__(self, device: torch.device, lag: int | None = None):
        self._on_cuda, self._lag = device.type == "cuda", lag
        self._running: deque[tuple[torch.cuda.Event | None, Copies]] = deque()

    def add(self, copies: Copies) -> None:
        """Add what holds results of ``start_copy``."""
        event = None
        if self._on_cuda:
            event = torch.cuda.Event()
            event.record()
        self._running.append((event, copies))

    def take(self, wait: bool = False) -> Iterator[Copies]:
        """Yield what has arrived since the last call, see ``lag``.

        Args:
            wait: wait for all.
        """
        while self._running:
            event = self._running[0][0]
            if self._lag is not None and not wait and len(self._running) <= self._lag:
                return
            if event is not None and (wait or self._lag is not None):
                event.synchronize()
            elif event is not None and not event.query():
                return
            yield self._running.popleft()[1]
