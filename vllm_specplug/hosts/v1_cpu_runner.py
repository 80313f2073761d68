"""The V1 model runner with trees on the host's CPU attention."""

from __future__ import annotations

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_specplug.hosts.attention import TreeAttentionImpl, TreeRows, scratch_metadata
from vllm_specplug.hosts.v1_runner import StagedStep, TreeModelRunner
from vllm_specplug.types import KvMoves, Walk


class TreeCPUModelRunner(TreeModelRunner, CPUModelRunner):
    """CPU runner of the host whose drafts are trees."""

    scratch_metadata = staticmethod(scratch_metadata)

    def _tree_rows(self, context_lens, start, lens, mask, masked, flat_rows, all_rows) -> TreeRows:
        block_table = self.input_batch.block_table[0].get_device_tensor(len(lens))
        if len(masked) < len(lens):
            index = torch.tensor(masked)
            context_lens, block_table, mask, start, lens = (
                t[index] for t in (context_lens, block_table, mask, start, lens)
            )
        return TreeRows(
            block_table=block_table,
            context_lens=context_lens,
            query_start=start,
            query_lens=lens,
            tree_start=start,
            tree_lens=lens,
            mask=mask,
            all_rows=all_rows,
            commit_rows=flat_rows,
        )

    def _commit(self, step: StagedStep, walk: Walk, moves: KvMoves) -> None:
        """Rewrite the accepted rows' key/value behind the context, layer by layer."""
        if step.rows is None or not moves.source_rows.numel():
            return
        assert step.rows.commit_rows is not None
        kept = torch.searchsorted(step.rows.commit_rows, moves.source_rows)
        slots = self.input_batch.block_table[0].slot_mapping.gpu[moves.target_rows]
        for name, layer in self._target_layers().items():
            key, value = step.rows.kept[name]
            impl: TreeAttentionImpl = layer.impl
            impl.do_kv_cache_update(layer, key[kept], value[kept], layer.kv_cache, slots)
