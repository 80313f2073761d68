"""Drafters that predict a block of positions in one forward on the V2 runner: their rows, and the growth of trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_specplug.core.draft_sampling import Children, DraftSampling
from vllm_specplug.core.layout import ancestor_bits
from vllm_specplug.core.tree_rows import DeviceTreeRows
from vllm_specplug.gpu.attention import LevelMetadata
from vllm_specplug.gpu.kernels.growth import KERNELS, likeliest
from vllm_specplug.proposers.dflash import DFlashOptions
from vllm_specplug.proposers.dflash.drafting import grow_block, same_after_all
from vllm_specplug.types import Draft
from vllm_specplug.utils.lazy import load
from vllm_specplug.vllm.drafters.eagle_levels import LevelScratch

#: By method under which vLLM loads a head: the speculator.
_SPECULATORS = {
    "dflash": "vllm_specplug.gpu.drafters.dflash:TreeDFlashSpeculator",
    "dspark": "vllm_specplug.gpu.drafters.dflash:TreeDFlashSpeculator",
    "eagle3": "vllm_specplug.gpu.drafters.peagle:TreePEagleSpeculator",
}


def make_speculator(vllm_config: Any, device: torch.device, req_states: Any) -> Any:
    """Make the speculator of the configured head."""
    return load(_SPECULATORS[vllm_config.speculative_config.method])(vllm_config, device, req_states)


class BestPaths:
    """Mixed into a ``TreeSpeculator`` whose drafter predicts all positions in one forward."""

    options: DFlashOptions
    sampling: DraftSampling | None
    draft_depth: int
    draft_nodes: int

    def _best_paths(
        self,
        root_token_ids: torch.Tensor,
        num_positions: int,
        logits: torch.Tensor | Callable[[int, torch.Tensor], torch.Tensor],
        draft_ids: torch.Tensor | None,
    ) -> Draft:
        """Draft the tree of the best paths for each request.

        Args:
            root_token_ids: int64 ``[num_reqs]``; last emitted tokens.
            num_positions: that were predicted.
            logits: ``[num_reqs, num_positions, draft_vocab]``, or ``BlockHead.logits_after``.
            draft_ids: int64 ``[draft_vocab]``; the target's token id of each logit; None: the same.
        """

        def after(position: int, token_ids: torch.Tensor, top_k: int) -> Children:
            assert not isinstance(logits, torch.Tensor)
            return self._choose(logits(position, token_ids), position, top_k, draft_ids)

        def of_position(position: int, top_k: int) -> Children:
            assert isinstance(logits, torch.Tensor)
            return self._choose(logits[:, position].contiguous(), position, top_k, draft_ids)

        return grow_block(
            root_token_ids,
            same_after_all(of_position) if isinstance(logits, torch.Tensor) else after,
            num_positions=min(self.draft_depth, num_positions),
            num_nodes=min(self.options.num_speculative_tokens, self.draft_nodes),
            ops=KERNELS,
        )

    def _choose(self, logits: torch.Tensor, position: int, top_k: int, draft_ids: torch.Tensor | None) -> Children:
        if self.sampling is None:
            return likeliest(logits, top_k, draft_ids)
        return self.sampling.children(logits, position, top_k, draft_ids)


class BlockRows:
    """Where the rows of all blocks are, in a forward and in the scratch; the first requests' part serves any batch.

    Args:
        scratch: key/value of the blocks.
        size: rows of a block.
        max_num_reqs: the largest batch.
        is_causal: whether a row sees only the rows of its block before it.
        device: of all tensors.
    """

    def __init__(self, scratch: LevelScratch, size: int, max_num_reqs: int, is_causal: bool, device: torch.device):
        self.scratch, self.size, self.capacity = scratch, size, max_num_reqs * size
        block = torch.ones(size, size, dtype=torch.bool, device=device)
        block = block.tril() if is_causal else block
        self.bits = ancestor_bits(block.expand(max_num_reqs, -1, -1)).contiguous()
        self.start = torch.arange(max_num_reqs, dtype=torch.int32, device=device) * size
        self.lens = torch.full_like(self.start, size)
        self.rows = torch.arange(self.capacity, device=device)

    def metadata(self, block_table: torch.Tensor, context_lens: torch.Tensor, max_context_len: int) -> LevelMetadata:
        """Make attention metadata of int32 ``[num_reqs, max_blocks]`` and int32 ``[num_reqs]``."""
        num_reqs = len(context_lens)
        tree = DeviceTreeRows(
            context_lens=context_lens,
            query_start=self.start[:num_reqs],
            query_lens=self.lens[:num_reqs],
            tree_start=self.start[:num_reqs],
            tree_lens=self.lens[:num_reqs],
            all_rows=True,
            scratch=self.scratch.scratch.at(self.rows[: num_reqs * self.size], self.capacity),
            bits=self.bits[:num_reqs],
            max_query_len=self.size,
            max_context_len=max_context_len,
            uniform=True,
        )
        return LevelMetadata(block_table, tree)
