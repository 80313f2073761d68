"""The V1 model runner with trees on vLLM's CPU attention."""

from __future__ import annotations

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_specplug.config import ConfigError
from vllm_specplug.core.step import StepPlan
from vllm_specplug.hosts.attention.cpu import level_metadata
from vllm_specplug.hosts.attention.rows import CpuTreeRows
from vllm_specplug.hosts.v1.runner import TreeModelRunner
from vllm_specplug.kernels.tree_attention import write_rows


class TreeCPUModelRunner(TreeModelRunner, CPUModelRunner):
    """vLLM's CPU runner with draft trees."""

    level_metadata = staticmethod(level_metadata)

    def check_target(self) -> None:
        """Refuse a target whose layers have keys and values of different shapes.

        Raises:
            ConfigError: naming a layer.
        """
        shapes = {name: (one.impl.num_kv_heads, one.impl.head_size) for name, one in self._target_layers().items()}
        first = next(iter(shapes.values()))
        for name, shape in shapes.items():
            if shape != first:
                raise ConfigError(
                    f"tree speculation needs layers with equal KV heads on a CPU: {name} has (KV heads, head size) "
                    f"{shape}, others {first}; serve this model without speculation"
                )

    def _tree_rows(self, context_lens, start, lens, mask, masked, flat_rows, all_rows) -> CpuTreeRows:
        block_table = self.input_batch.block_table[0].get_device_tensor(len(lens))
        if len(masked) < len(lens):
            index = torch.tensor(masked)
            context_lens, block_table, mask, start, lens = (
                t[index] for t in (context_lens, block_table, mask, start, lens)
            )
        layers = self._target_layers()
        impl = next(iter(layers.values())).impl
        shape = (len(layers), 2, len(flat_rows), impl.num_kv_heads, impl.head_size)
        kept = torch.empty(shape, dtype=self.model_config.dtype)
        return CpuTreeRows(
            block_table=block_table,
            context_lens=context_lens,
            query_start=start,
            query_lens=lens,
            tree_start=start,
            tree_lens=lens,
            mask=mask,
            all_rows=all_rows,
            commit_rows=flat_rows,
            kept=kept,
            kept_of=dict(zip(layers, kept.unbind(0), strict=True)),
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
        sources, targets = torch.from_numpy(sources[written]), torch.from_numpy(targets[written])
        if not rows.all_rows:
            sources = torch.searchsorted(rows.commit_rows, sources)
        if targets.numel():
            slots = self.input_batch.block_table[0].slot_mapping.gpu[targets]
            layers = self._target_layers().values()
            write_rows(rows.kept, [layer.kv_cache for layer in layers], next(iter(layers)).isa, sources, slots)
