"""Commit: make the accepted path's key/value contiguous after the context.

Who owns which cache slots of a request, by token index; C = context length at the start of the step, W = the tree's
rows, E = tokens emitted by the walk, the bonus token included (half-open ranges; every range is in slots that vLLM
has allocated to the request):

    range          before forward   after forward        after the moves        next step
    [0, C)         valid            valid                valid                  valid
    [C, C + 1)     owned, empty     the root             valid (the root)       valid
    [C + 1, C + E) owned, empty     tree rows 1..E-1     valid (accepted path)  valid
    [C + E, C + W) owned, empty     tree rows E..W-1     unused: garbage        owned, overwritten by the next tree
    [C + W, ...)   not owned        not owned            not owned              not owned

The bonus token is the next step's root: it has no key/value until that forward writes it at C + E.  The context
therefore grows by E, and a rollback copies nothing.  The target of the d-th node of a path, C + d, never lies after
its source: rows are parent-first, so that the node is at row d or later.

``core/step.py: plan_step`` computes the moves.  On a CPU, a forward that has tree rows only writes nothing to the
pages: its key/value is kept aside, and the commit writes that of the accepted rows and the root to the same slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KvScratch:
    """Key/value of drafted nodes in a layer, outside the pages; it is not kept after the draft phase (stable KV).

    Attributes:
        key, value: ``[num_reqs * capacity, num_kv_heads, head_size]``.
        rows: int64 ``[num_tokens]``; place of this forward's rows.
    """

    key: torch.Tensor
    value: torch.Tensor
    rows: torch.Tensor

    def write(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write this forward's key/value to its rows; return the whole scratch."""
        self.key.index_copy_(0, self.rows, key)
        self.value.index_copy_(0, self.rows, value)
        return self.key, self.value


class DraftScratch:
    """The scratch of a drafter's attention layers; allocated on first use, and again if it must hold more rows.

    Args:
        shapes: by layer name, ``(num_kv_heads, head_size)``.
        dtypes: of the rows, by layer name.
        device: of the layers.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, int]],
        dtypes: Mapping[str, torch.dtype],
        device: torch.device | str = "cpu",
    ):
        self._shapes, self._dtypes, self._device = dict(shapes), dict(dtypes), device
        self._size = 0
        self._tensors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def at(self, rows: torch.Tensor, size: int) -> dict[str, KvScratch]:
        """Return the scratch by layer name, for a forward whose rows go to ``rows``; it has at least ``size``."""
        if size > self._size:
            self._size = size
            for name, shape in self._shapes.items():
                key = torch.zeros(size, *shape, dtype=self._dtypes[name], device=self._device)
                self._tensors[name] = (key, torch.zeros_like(key))
        return {name: KvScratch(key, value, rows) for name, (key, value) in self._tensors.items()}
