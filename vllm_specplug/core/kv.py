"""Commit: make the accepted path's key/value contiguous behind the context.

Who owns which cache slots of a request, by token index; C = context length at the start of the step, W = the tree's
rows, E = tokens emitted by the walk, the bonus token included (half-open ranges; every range is in slots that the host
has allocated to the request):

    range          before forward   after forward        after the moves        next step
    [0, C)         valid            valid                valid                  valid
    [C, C + 1)     owned, empty     the root             valid (the root)       valid
    [C + 1, C + E) owned, empty     tree rows 1..E-1     valid (accepted path)  valid
    [C + E, C + W) owned, empty     tree rows E..W-1     free: garbage          owned, overwritten by the next tree
    [C + W, ...)   free             free                 free                   free

The bonus token is the next step's root: it has no key/value until that forward writes it at C + E.  The context
therefore grows by E, rollback is nothing but forgetting, and row d's target C + d never lies behind its source
(rows are parent-first, so the d-th node of a path is at row d or later).

On a CPU a forward of tree rows only writes nothing: its rows are kept aside, and the commit writes those accepted,
the root among them.  The slots are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vllm_specplug.core.loops import rows as row_loops
from vllm_specplug.core.loops.arrays import is_cpu_without_autograd
from vllm_specplug.types import KvMoves, Walk


@dataclass(frozen=True)
class KvScratch:
    """Key/value of drafted nodes in a layer, outside the pages: thrown away after each round (stable KV).

    Attributes:
        key, value: ``[num_reqs * capacity, num_kv_heads, head_size]``.
        rows: int64 ``[num_tokens]``; where this forward's rows go.
    """

    key: torch.Tensor
    value: torch.Tensor
    rows: torch.Tensor

    def write(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put this forward's key/value in their rows; the whole scratch."""
        self.key.index_copy_(0, self.rows, key)
        self.value.index_copy_(0, self.rows, value)
        return self.key, self.value


class DraftScratch:
    """The scratch of a drafter's attention layers: allocated on first use, anew where it must hold more rows.

    Args:
        shapes: by layer name, ``(num_kv_heads, head_size)``.
        dtype, device: of the layers.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, int]], dtype: torch.dtype, device: torch.device | str = "cpu"):
        self._shapes, self._dtype, self._device = dict(shapes), dtype, device
        self._size = 0
        self._tensors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def at(self, rows: torch.Tensor, size: int) -> dict[str, KvScratch]:
        """By layer name, for a forward whose rows go to ``rows``; ``size`` rows are needed in all."""
        if size > self._size:
            self._size = size
            for name, shape in self._shapes.items():
                key = torch.zeros(size, *shape, dtype=self._dtype, device=self._device)
                self._tensors[name] = (key, torch.zeros_like(key))
        return {name: KvScratch(key, value, rows) for name, (key, value) in self._tensors.items()}


def plan_moves(walk: Walk, row_start: torch.Tensor, compact: bool | None = None) -> KvMoves:
    """Plan the copies of the accepted nodes' key/value.

    Args:
        walk: the result of the walk.
        row_start: int ``[num_reqs]``; flat row of each request's root in the verification forward.
        compact: drop copies of a row onto itself.  That makes the size depend on the data, which is free on a CPU
            (the default there) and stalls other devices; there, unused places hold a copy of the root onto itself.
    """
    if compact is not False and is_cpu_without_autograd(walk.path_rows, row_start):
        moves = row_loops.plan_moves(walk, row_start)
        if moves is not None:
            return moves
    depths = torch.arange(walk.path_rows.shape[1], device=walk.path_rows.device)
    first = row_start.long().unsqueeze(1)
    moved = (depths < walk.num_emitted.unsqueeze(1)) & (walk.path_rows != depths)
    sources, targets = first + walk.path_rows, first + depths
    if compact is None:
        compact = walk.path_rows.device.type == "cpu"
    if compact:
        places = moved.flatten().nonzero().squeeze(1)
        return KvMoves(sources.flatten()[places], targets.flatten()[places])
    # No move ever writes a root's row, so copying it onto itself cannot undo another move.
    return KvMoves(torch.where(moved, sources, first).flatten(), torch.where(moved, targets, first).flatten())


def apply_moves(cache_rows: torch.Tensor, moves: KvMoves, slot_mapping: torch.Tensor | None = None) -> torch.Tensor:
    """Perform the moves on a dense cache, in place (reference).

    All sources are read before any target is written: a source may be another move's target.

    Args:
        cache_rows: ``[num_slots, ...]``.
        moves: the plan.
        slot_mapping: int64 ``[num_flat_rows]``; slot of each flat row; None where rows are slots.

    Returns:
        ``cache_rows``.
    """
    sources, targets = moves.source_rows, moves.target_rows
    if slot_mapping is not None:
        sources, targets = slot_mapping[sources], slot_mapping[targets]
    cache_rows[targets] = cache_rows[sources]
    return cache_rows
