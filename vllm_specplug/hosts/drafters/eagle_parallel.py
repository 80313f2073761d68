"""Parallel EAGLE heads in vLLM: all levels from one forward over mask rows (proposers/eagle2/parallel.py)."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import ReplicatedLinear

from vllm_specplug.proposers.eagle2.drafting import DraftFeatures
from vllm_specplug.proposers.eagle2.parallel import follow


class MaskRows(torch.nn.Module):
    """What a parallel head has besides an EAGLE head's weights.

    Args:
        hidden_size, rank: of the network that reads the token above; rank 0: there is none.
        token_id: of the mask token.
        dtype: of the weights.
        prefix: of the layers' names.
    """

    def __init__(self, hidden_size: int, rank: int, token_id: int, dtype: torch.dtype, prefix: str):
        super().__init__()
        self.token_id, self.has_follow = token_id, rank > 0
        self.mask_hidden = torch.nn.Parameter(torch.zeros(hidden_size, dtype=dtype), requires_grad=False)
        if self.has_follow:
            self.down = _linear(2 * hidden_size, rank, dtype, f"{prefix}.down")
            self.up = _linear(rank, hidden_size, dtype, f"{prefix}.up")

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights by their names in a checkpoint."""
        weights = {"mask_hidden": self.mask_hidden}
        if self.has_follow:
            weights |= {"follow.down.weight": self.down.weight, "follow.up.weight": self.up.weight}
        return weights

    def follows(self, outputs: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """Correct mask rows' outputs for the tokens above: both ``[num_rows, hidden_size]``."""
        if not self.has_follow:
            return outputs
        return follow(outputs, embeddings, self.down, self.up)


def _linear(inputs: int, outputs: int, dtype: torch.dtype, prefix: str) -> ReplicatedLinear:
    return ReplicatedLinear(inputs, outputs, bias=False, params_dtype=dtype, prefix=prefix, return_bias=False)


class ParallelLevels:
    """The levels behind a parallel head's first row, for one draft phase.

    Args:
        levels: ``EagleLevels`` or ``eagle_levels_v2.DeviceChain`` of the draft phase.
        mask_rows: the head's own.
        embed: ``[num_rows]`` token ids -> ``[num_rows, hidden_size]``.
        num_levels: mask rows of each request.
    """

    def __init__(self, levels: Any, mask_rows: MaskRows, embed: Any, num_levels: int):
        self._levels, self._mask_rows, self._embed, self._num_levels = levels, mask_rows, embed, num_levels
        self._outputs: torch.Tensor | None = None

    def forward(self, level: int, token_ids: torch.Tensor, features: torch.Tensor, mask: torch.Tensor) -> DraftFeatures:
        """Return the features of the nodes that are extended at a level, see ``proposers.eagle2.drafting.grow_tree``.

        Only the first call runs the head; the nodes' features and mask are not read.
        """
        if self._outputs is None:
            self._outputs = self._levels.chain(self._mask_rows.token_id, self._mask_rows.mask_hidden, self._num_levels)
        outputs = self._outputs[:, level, None].expand(-1, token_ids.shape[1], -1).flatten(0, 1)
        outputs = self._mask_rows.follows(outputs, self._embed(token_ids.flatten())).unflatten(0, token_ids.shape)
        return DraftFeatures(outputs, outputs)
