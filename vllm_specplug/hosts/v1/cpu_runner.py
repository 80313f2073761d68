"""The V1 model runner with trees on vLLM's CPU attention."""

from __future__ import annotations

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_specplug.core.step import StepPlan
from vllm_specplug.hosts.attention.cpu import level_metadata
from vllm_specplug.hosts.attention.rows import CpuTreeRows
from vllm_specplug.hosts.kv_groups import AlikeLayers
from vllm_specplug.hosts.v1.runner import TreeModelRunner
from vllm_specplug.kernels.tree_attention import write_rows


class TreeCPUModelRunner(TreeModelRunner, CPUModelRunner):
    """vLLM's CPU runner with draft trees."""

    level_metadata = staticmethod(level_metadata)

    def _tree_rows(self, context_lens, start, lens, mask, masked, flat_rows, all_rows) -> CpuTreeRows:
        if len(masked) < len(lens):
            lens = torch.zeros_like(lens).index_copy_(0, index := torch.tensor(masked), lens[index])
        kept = tuple(self._room_for(alike, len(flat_rows)) for alike in self.alike_layers)
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
            kept_of={
                name: part
                for alike, rows in zip(self.alike_layers, kept, strict=True)
                for name, part in zip(alike.layers, rows.unbind(0), strict=True)
            },
        )

    def _room_for(self, alike: AlikeLayers, num_rows: int) -> torch.Tensor:
        impl = next(iter(alike.layers.values())).impl
        shape = (len(alike.layers), 2, num_rows, impl.num_kv_heads, impl.head_size)
        return torch.empty(shape, dtype=self.model_config.dtype)

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
        sources, targets = torch.from_numpy(sources[written]), torch.from_numpy(targets[written])
        if not targets.numel():
            return
        if not rows.all_rows:
            sources = torch.searchsorted(rows.commit_rows, sources)
        for alike, kept in zip(self.alike_layers, rows.kept, strict=True):
            slots = self.input_batch.block_table[alike.group].slot_mapping.gpu[targets]
            isa = next(iter(alike.layers.values())).isa
            write_rows(kept, alike.caches, isa, sources, slots)
