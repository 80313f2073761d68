"""The trace of the V2 runner: trees are copied from the device without waiting, and written some steps later."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from vllm_specplug.gpu.late_copies import LateCopies, start_copy
from vllm_specplug.types import TokenTree, Walk
from vllm_specplug.vllm.trace import MAX_TREES, TreeTrace


class LateTrace:
    """Writes what ``TreeTrace`` writes, without what only the draft phase knows (values and sources).

    Args:
        path: the file; None writes nothing.
        device: of the trees.
    """

    def __init__(self, path: str | None, device: torch.device):
        self._trace = TreeTrace(path)
        self._copies: LateCopies[tuple[list[str], TokenTree, Walk]] = LateCopies(device)

    @property
    def is_on(self) -> bool:
        """Return whether more trees are wanted."""
        return self._trace.path is not None and self._trace.written < MAX_TREES

    def add(self, req_ids: list[str], tree: TokenTree, walk: Walk) -> None:
        """Copy the verified trees of one step, and write those of earlier ones that have arrived."""
        self._copies.add((list(req_ids), _copied(tree), _copied(walk)))
        self._write()

    def close(self) -> None:
        """Write the last trees; waits for their copies."""
        self._write(wait=True)

    def _write(self, wait: bool = False) -> None:
        for req_ids, tree, walk in self._copies.take(wait):
            self._trace.write(req_ids, tree, walk, {})


def _copied(values: TokenTree | Walk) -> TokenTree | Walk:
    """Start copies of all tensors."""
    return replace(values, **{field.name: start_copy(getattr(values, field.name)) for field in fields(values)})
