"""The draft levels of EAGLE on the V2 runner: a level's inputs come from one kernel and from tensors made once."""

from __future__ import annotations

import torch

from vllm_specplug.core.tree_rows import DeviceTreeRows
from vllm_specplug.gpu.attention import LevelMetadata
from vllm_specplug.gpu.kernels.growth import start_levels
from vllm_specplug.proposers.eagle2.drafting import DraftFeatures
from vllm_specplug.vllm.drafters.eagle_levels import LevelScratch, run_level


class LevelRows:
    """Where the rows of each level are, in a forward and in the scratch; the first requests' part serves any batch.

    Args:
        scratch: key/value of the levels.
        width: rows of a request in a forward.
        num_levels: forwards of the drafter after its first one.
        max_num_reqs: the largest batch.
        device: of all tensors.

    Attributes:
        query_start, query_lens, tree_start: int32 ``[max_num_reqs]``; see ``TreeRows``.
        tree_lens: int32 ``[max_num_reqs]`` for each level.
        rows: int64 ``[max_num_reqs * width]`` for each level; its rows in the scratch.
    """

    def __init__(self, scratch: LevelScratch, width: int, num_levels: int, max_num_reqs: int, device: torch.device):
        self.scratch, self.width, self.num_levels = scratch, width, num_levels
        self.size = max_num_reqs * scratch.capacity
        self.max_position = scratch.vllm_config.model_config.max_model_len - 1
        requests = torch.arange(max_num_reqs, dtype=torch.int32, device=device)
        self.query_start, self.tree_start = requests * self.width, requests * scratch.capacity
        self.query_lens = torch.full_like(requests, self.width)
        levels = range(self.num_levels)
        self.tree_lens = [torch.full_like(requests, (level + 1) * self.width) for level in levels]
        first, columns = self.tree_start.long().unsqueeze(1), torch.arange(self.width, device=device)
        self.rows = [(first + level * self.width + columns).flatten() for level in levels]


class DeviceLevels:
    """The drafter's forwards after its first one, for one draft phase.

    Args:
        model: vLLM's draft model.
        rows: of the levels.
        slots: int ``[num_reqs]``; -1: the request is not used and attends to no context.
        positions: int64 ``[num_reqs]``; of each request's newest accepted row.
        block_table: int32 ``[num_reqs, max_blocks]``; None: there is no cache yet, and attention layers return zeros.
        max_context_len: at least the longest context.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        rows: LevelRows,
        slots: torch.Tensor,
        positions: torch.Tensor,
        block_table: torch.Tensor | None,
        max_context_len: int,
    ):
        self._model, self._rows, self._block_table, self._max_context_len = model, rows, block_table, max_context_len
        self._context_lens, self._positions = start_levels(
            slots, positions, rows.num_levels, rows.width, rows.max_position
        )

    def forward(self, level: int, token_ids: torch.Tensor, features: torch.Tensor, bits: torch.Tensor) -> DraftFeatures:
        """Run the drafter over the nodes of one level, see ``proposers.eagle2.drafting.grow_tree``; mask in words."""
        metadata = None if self._block_table is None else self._metadata(level, *token_ids.shape, bits)
        return run_level(self._model, self._rows.scratch, token_ids, features, self._positions[level], metadata)

    def _metadata(self, level: int, num_reqs: int, width: int, bits: torch.Tensor) -> LevelMetadata:
        rows = self._rows
        tree = DeviceTreeRows(
            context_lens=self._context_lens,
            query_start=rows.query_start[:num_reqs],
            query_lens=rows.query_lens[:num_reqs],
            tree_start=rows.tree_start[:num_reqs],
            tree_lens=rows.tree_lens[level][:num_reqs],
            all_rows=True,
            scratch=rows.scratch.scratch.at(rows.rows[level][: num_reqs * width], rows.size),
            bits=bits,
            max_query_len=width,
            max_context_len=self._max_context_len,
            uniform=True,
        )
        return LevelMetadata(self._block_table[:num_reqs], tree)
