"""The V1 model runner with trees on vLLM's CPU attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.distributed import get_pp_group
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_specplug.core.step import StepPlan
from vllm_specplug.hosts.attention.cpu import level_metadata
from vllm_specplug.hosts.attention.rows import CpuTreeRows
from vllm_specplug.hosts.kv_groups import AlikeLayers
from vllm_specplug.hosts.v1.greedy_head import GreedyHead
from vllm_specplug.hosts.v1.runner import TreeModelRunner
from vllm_specplug.hosts.v1.sampled_walk import is_argmax
from vllm_specplug.kernels.tree_attention import write_rows

#: A step of more tree rows gets memory of its own: the shared memory is 16 MiB for a Llama of 8 billion parameters.
SHARED_ROWS = 128


class RowRooms:
    """Memory for the key/value of a step's tree rows until they are committed; all steps use the same.

    Args:
        layers: the target's.
        dtype: of their key/value.
    """

    def __init__(self, layers: Sequence[AlikeLayers], dtype: torch.dtype):
        self._layers, self._dtype = layers, dtype
        self._memory = [torch.empty(math.prod(self._shape(alike, SHARED_ROWS)), dtype=dtype) for alike in layers]
        self._made: dict[int, tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]] = {}

    def of(self, num_rows: int) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        """Return ``kept`` and ``kept_of`` of ``CpuTreeRows`` for a step of ``num_rows`` tree rows."""
        if num_rows > SHARED_ROWS:
            shapes = [self._shape(alike, num_rows) for alike in self._layers]
            return self._with_names([torch.empty(shape, dtype=self._dtype) for shape in shapes])
        if num_rows not in self._made:
            shapes = [self._shape(alike, num_rows) for alike in self._layers]
            rooms = [all_[: math.prod(shape)].view(shape) for all_, shape in zip(self._memory, shapes, strict=True)]
            self._made[num_rows] = self._with_names(rooms)
        return self._made[num_rows]

    @staticmethod
    def _shape(alike: AlikeLayers, num_rows: int) -> tuple[int, ...]:
        impl = next(iter(alike.layers.values())).impl
        return len(alike.layers), 2, num_rows, impl.num_kv_heads, impl.head_size

    def _with_names(self, rooms: list[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        kept_of: dict[str, torch.Tensor] = {}
        for alike, room in zip(self._layers, rooms, strict=True):
            kept_of.update(zip(alike.layers, room.unbind(0), strict=True))
        return tuple(rooms), kept_of


class TreeCPUModelRunner(TreeModelRunner, CPUModelRunner):
    """vLLM's CPU runner with draft trees."""

    level_metadata = staticmethod(level_metadata)
    greedy_head: GreedyHead | None = None

    def prepare_greedy_head(self) -> None:
        """Let greedy steps compute fewer logits; called at the end of the start, when the weights are packed."""
        config = self.model_config
        if not self.lora_config and get_pp_group().is_last_rank:
            self.greedy_head = GreedyHead.make(self.model, config.get_hidden_size(), config.dtype)

    def greedy_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.greedy_head is not None:
            self.greedy_head.expect(True)
        return super().greedy_logits(hidden)

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        if self.greedy_head is not None:
            self.greedy_head.expect(
                self.speculative_config.specplug.verification == "exact"
                and not scheduler_output.has_structured_output_requests
                and is_argmax(self.input_batch.sampling_metadata)
            )
        return prepared

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)
        self._rooms = RowRooms(self.alike_layers, self.model_config.dtype)

    def _tree_rows(self, context_lens, start, lens, mask, masked, flat_rows, all_rows) -> CpuTreeRows:
        if len(masked) < len(lens):
            lens = torch.zeros_like(lens).index_copy_(0, index := torch.tensor(masked), lens[index])
        kept, kept_of = self._rooms.of(len(flat_rows))
        return CpuTreeRows(
            context_lens=context_lens,
            query_start=start,
            query_lens=lens,
            tree_start=start,
            tree_lens=lens,
            mask=mask,
            all_rows=all_rows,
            commit_rows=flat_rows,
            kept=kept,
            kept_of=kept_of,
        )

    def commit(self, plan: StepPlan) -> None:
        """Write the accepted rows' key/value behind the context, in all layers.

        A forward that has tree rows only writes nothing to the pages: rejected rows never reach them.
        """
        rows = self._step.rows
        if rows is None:
            return
        assert rows.commit_rows is not None
        sources, targets = plan.source_rows.numpy(), plan.target_rows.numpy()
        written = sources >= 0 if rows.all_rows else sources != targets
        sources, targets = sources[written], targets[written]
        if not len(targets):
            return
        if not rows.all_rows:
            sources = np.searchsorted(rows.commit_rows.numpy(), sources)
        for alike, kept in zip(self.alike_layers, rows.kept, strict=True):
            slots = self.input_batch.block_table[alike.group].slot_mapping.gpu.numpy()[targets]
            isa = next(iter(alike.layers.values())).isa
            write_rows(kept, alike.caches, isa, torch.from_numpy(sources), torch.from_numpy(slots))
