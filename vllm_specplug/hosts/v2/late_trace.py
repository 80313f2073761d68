"""The trace of the V2 runner: trees are copied from the device without waiting, and written some steps later."""

from __future__ import annotations

from collections import deque
from dataclasses import fields, replace

import torch

from vllm_specplug.hosts.trace import MAX_TREES, TreeTrace
from vllm_specplug.types import TokenTree, Walk


class LateTrace:
    """Writes what ``TreeTrace`` writes, without what only the draft phase knows (values and sources).

    Args:
        path: the file; None writes nothing.
        device: of the trees.
    """

    def __init__(self, path: str | None, device: torch.device):
        self._trace, self._on_cuda = TreeTrace(path), device.type == "cuda"
        #: Copies that may still run.
        self._copies: deque[tuple[torch.cuda.Event | None, list[str], TokenTree, Walk]] = deque()

    @property
    def is_on(self) -> bool:
        """Return whether more trees are wanted."""
        return self._trace.path is not None and self._trace.written < MAX_TREES

    def add(self, req_ids: list[str], tree: TokenTree, walk: Walk) -> None:
        """Copy the verified trees of one step, and write those of earlier ones that have arrived."""
        event = None
        tree, walk = _copied(tree), _copied(walk)
        if self._on_cuda:
            event = torch.cuda.Event()
            event.record()
        self._copies.append((event, list(req_ids), tree, walk))
        while self._copies and (self._copies[0][0] is None or self._copies[0][0].query()):
            self._write_first()

    def close(self) -> None:
        """Write the last trees; waits for their copies."""
        while self._copies:
            if (event := self._copies[0][0]) is not None:
                event.synchronize()
            self._write_first()

    def _write_first(self) -> None:
        _, req_ids, tree, walk = self._copies.popleft()
        self._trace.write(req_ids, tree, walk, {})


def _copied(values: TokenTree | Walk) -> TokenTree | Walk:
    """Start copies of all tensors to the CPU; on CUDA they are in pinned memory, so that nothing waits for them."""
    tensors = {field.name: getattr(values, field.name) for field in fields(values)}
    return replace(values, **{name: one.to("cpu", non_blocking=True, copy=True) for name, one in tensors.items()})
