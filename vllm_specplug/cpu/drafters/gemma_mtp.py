"""The assistant of Gemma 4 on the V1 runner."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.gemma4 import Gemma4Proposer

from vllm_specplug.core.kv import KvScratch
from vllm_specplug.cpu.attention import level_metadata
from vllm_specplug.cpu.drafters.levels import LevelDrafter
from vllm_specplug.proposers.eagle2.drafting import DraftFeatures
from vllm_specplug.vllm.drafters.eagle_levels import run_forward
from vllm_specplug.vllm.drafters.setup import target_info
from vllm_specplug.vllm.drafters.target_parts import TargetParts


class TreeGemmaMTPProposer(LevelDrafter, Gemma4Proposer):
    """Gemma 4: a small model whose layers read the target's keys and values, and have none of their own.

    So there is nothing to catch up with, and all levels attend from the position of the newest accepted row.
    """

    def load_model(self, target_model: torch.nn.Module) -> None:
        super().load_model(TargetParts(target_model, target_info(self.vllm_config.model_config)))
        layers = self.compilation_config.static_forward_context
        for name, impl in self.draft_layers.items():  # vLLM tells the layers only
            impl.kv_sharing_target_layer_name = layers[name].kv_sharing_target_layer_name

    def _setup_centroids_cuda_graphs(self) -> None:
        """Nothing: these graphs need a GPU."""

    def skip_draft(self, *_: Any) -> None:
        pass

    def catch_up(self) -> None:
        pass

    def _logits(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.model.compute_logits(hidden), None

    def _levels(self, num_rows: int, rows: torch.Tensor, metadata: CommonAttentionMetadata) -> SharedLevels:
        return SharedLevels(self, metadata.seq_lens[: len(rows)])

    def block_tables(self) -> dict[str, torch.Tensor]:
        """Return the block table of each draft layer's group, by layer name."""
        tables = self._per_group_block_tables
        return {name: tables[one.kv_cache_group_id] for one in self.draft_attn_groups for name in one.layer_names}


class SharedLevels:
    """Forwards of a drafter that reads the target's cache.

    Args:
        proposer: of the drafter.
        context_lens: int32 ``[num_reqs]``; tokens in the cache, which every row sees.
    """

    def __init__(self, proposer: TreeGemmaMTPProposer, context_lens: torch.Tensor):
        self._proposer, self._context_lens = proposer, context_lens
        self._first = torch.zeros_like(context_lens)

    def forward(self, level: int, token_ids: torch.Tensor, features: torch.Tensor, mask: torch.Tensor) -> DraftFeatures:
        """Run the drafter over the nodes of one level, see ``proposers.eagle2.drafting.grow_tree``."""
        num_reqs, width = token_ids.shape
        nothing = mask.new_zeros(num_reqs, width, 1)
        metadata = {
            name: level_metadata(table[:num_reqs], self._context_lens, self._first, nothing, self._no_rows(name))
            for name, table in self._proposer.block_tables().items()
        }
        positions = (self._context_lens.long() - 1).repeat_interleave(width)
        vllm_config = self._proposer.vllm_config
        return run_forward(self._proposer._forward, vllm_config, token_ids, features, positions, metadata)

    def _no_rows(self, name: str) -> dict[str, KvScratch]:
        """Return keys and values of drafted nodes: one row that no row sees."""
        impl = self._proposer.draft_layers[name]
        dtype = torch.uint8 if impl.is_fp8 else self._proposer.dtype
        row = torch.zeros(1, impl.num_kv_heads, impl.head_size, dtype=dtype)
        return {impl.kv_sharing_target_layer_name: KvScratch(row, row, torch.zeros(0, dtype=torch.int64))}
