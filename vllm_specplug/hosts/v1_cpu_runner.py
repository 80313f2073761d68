"""The V1 model runner with trees on the host's CPU attention."""

from __future__ import annotations

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_specplug.hosts.attention import TreeRows, scratch_metadata
from vllm_specplug.hosts.v1_runner import StagedStep, TreeModelRunner
from vllm_specplug.kernels.tree_attention import write_rows
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
        """Write the accepted rows' key/value behind the context, in all layers.

        In a forward of trees only nothing was written before: rejected rows never reach the pages.
        """
        if step.rows is None:
            return
        rows = step.rows
        assert rows.commit_rows is not None
        if rows.all_rows:
            # A request that emits nothing (it is in its prefill) has a root all the same.
            depths = torch.arange(walk.path_rows.shape[1])
            accepted = depths < walk.num_emitted.clamp(min=1).unsqueeze(1)
            first = step.row_start.unsqueeze(1)
            sources, targets = (first + walk.path_rows)[accepted], (first + depths)[accepted]
        else:
            sources, targets = torch.searchsorted(rows.commit_rows, moves.source_rows), moves.target_rows
        if not targets.numel():
            return
        slots = self.input_batch.block_table[0].slot_mapping.gpu[targets]
        layers = self._target_layers()
        keys, values = zip(*(rows.kept[name] for name in layers), strict=True)
        caches = [layer.kv_cache for layer in layers.values()]
        (isa,) = {layer.isa for layer in layers.values()}
        write_rows(keys, values, caches, isa, sources, slots)
