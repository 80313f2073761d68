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
    """

    def __init__(self, device: torch.device):
        self._on_cuda = device.type == "cuda"
        self._running: deque[tuple[torch.cuda.Event | None, Copies]] = deque()

    def add(self, copies: Copies) -> None:
        """Add what holds results of ``start_copy``."""
        event = None
        if self._on_cuda:
            event = torch.cuda.Event()
            event.record()
        self._running.append((event, copies))

    def take(self, wait: bool = False) -> Iterator[Copies]:
        """Yield what has arrived since the last call.

        Args:
            wait: wait for all.
        """
        while self._running:
            event = self._running[0][0]
            if event is not None and wait:
                event.synchronize()
            elif event is not None and not event.query():
                return
            yield self._running.popleft()[1]
