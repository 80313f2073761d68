"""The key/value of a step's tree rows on the CPU: kept aside until the walk is known, then committed to the pages.

The ownership table of cache slots is in ``core/kv.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_specplug.core.step import StepPlan
from vllm_specplug.core.tree_rows import CpuTreeRows
from vllm_specplug.cpu.kernels.tree_attention import LATENT_LAYOUT, write_rows
from vllm_specplug.vllm.kv_groups import AlikeLayers

#: A step of more tree rows gets memory of its own: the shared memory is 16 MiB for a Llama of 8 billion parameters.
SHARED_ROWS = 128


class KeptRows:
    """Memory for the key/value of a step's tree rows until they are committed; all steps use the same.

    Args:
        layers: the target's; their rows have the dtype of their caches.
    """

    def __init__(self, layers: Sequence[AlikeLayers]):
        self._layers = layers
        self._dtypes = [alike.caches[0].dtype for alike in layers]
        sizes = [math.prod(self._shape(alike, SHARED_ROWS)) for alike in layers]
        self._memory = [torch.empty(size, dtype=dtype) for size, dtype in zip(sizes, self._dtypes, strict=True)]
        self._views: dict[int, tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]] = {}

    def of(self, num_rows: int) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        """Return ``kept`` and ``kept_of`` of ``CpuTreeRows`` for a step of ``num_rows`` tree rows."""
        shapes = [self._shape(alike, num_rows) for alike in self._layers]
        if num_rows > SHARED_ROWS:
            new = zip(shapes, self._dtypes, strict=True)
            return self._with_names([torch.empty(shape, dtype=dtype) for shape, dtype in new])
        if num_rows not in self._views:
            views = [all_[: math.prod(shape)].view(shape) for all_, shape in zip(self._memory, shapes, strict=True)]
            self._views[num_rows] = self._with_names(views)
        return self._views[num_rows]

    @staticmethod
    def _shape(alike: AlikeLayers, num_rows: int) -> tuple[int, ...]:
        impl = next(iter(alike.layers.values())).impl
        parts = 1 if impl.reads_latents else 2
        return len(alike.layers), parts, num_rows, impl.num_kv_heads, impl.head_size

    def _with_names(self, kept: list[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        kept_of: dict[str, torch.Tensor] = {}
        for alike, rows in zip(self._layers, kept, strict=True):
            kept_of.update(zip(alike.layers, rows.unbind(0), strict=True))
        return tuple(kept), kept_of


def _layout(alike: AlikeLayers) -> str:
    """Return how the layers' pages are packed."""
    layer = next(iter(alike.layers.values()))
    return LATENT_LAYOUT if layer.impl.reads_latents else layer.isa


def write_accepted(rows: CpuTreeRows, plan: StepPlan, layers: Sequence[AlikeLayers], block_table: Any) -> None:
    """Write the accepted rows' key/value after the context, in all layers of the target.

    A forward that has tree rows only writes nothing to the pages: rejected rows never reach them.

    Args:
        rows: of the step; they have the key/value.
        plan: of the step.
        layers: the target's.
        block_table: vLLM's, by KV cache group; it has the step's slot mappings.
    """
    assert rows.commit_rows is not None
    sources, targets = plan.source_rows.numpy(), plan.target_rows.numpy()
    written = sources >= 0 if rows.all_rows else sources != targets
    sources, targets = sources[written], targets[written]
    if not len(targets):
        return
    if not rows.all_rows:
        sources = np.searchsorted(rows.commit_rows.numpy(), sources)
    for alike, kept in zip(layers, rows.kept, strict=True):
        slots = block_table[alike.group].slot_mapping.gpu.numpy()[targets]
        write_rows(kept, alike.caches, _layout(alike), torch.from_numpy(sources), torch.from_numpy(slots))
