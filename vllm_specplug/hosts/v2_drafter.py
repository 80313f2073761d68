"""What the V2 runner asks of every speculator of ours."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from vllm_specplug.config import TreeOptions, host_drafter
from vllm_specplug.hosts.v2_growth import Growth
from vllm_specplug.hosts.v2_trees import DeviceTrees


class TreeSpeculator(ABC):
    """Mixed into a speculator of the host: trees of a fixed size, drafted without a look at the device."""

    options: TreeOptions
    trees: DeviceTrees
    #: Attention layers of a draft model; empty where there is none.
    draft_attn_layer_names: set[str]

    def init_trees(self, vllm_config: Any, device: torch.device) -> None:
        """To be called by ``__init__``."""
        scheduler, config = vllm_config.scheduler_config, vllm_config.speculative_config
        self.options = host_drafter(config.specplug)
        self.trees = DeviceTrees(
            scheduler.max_num_seqs,
            config.num_speculative_tokens,
            self.options.draft_depth,
            scheduler.max_num_batched_tokens,
            device,
        )
        self._growth = Growth(self._grow, scheduler.max_num_seqs)

    def load_heads(self, target_model: torch.nn.Module) -> None:  # noqa: B027
        """Load what the host does not load itself."""

    @abstractmethod
    def _grow(self, num_reqs: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and parents, int64 ``[num_reqs, num_rows]``; see ``v2_growth.Grow``."""

    def _draft(self, input_batch: Any, dummy_run: bool, *inputs: torch.Tensor) -> torch.Tensor:
        """Grow the trees, keep their parents, and hand the nodes' tokens to the host.

        Returns:
            int64 ``[num_reqs, num_speculative_tokens]``.
        """
        token_ids, parents = self._growth(input_batch.num_reqs, *inputs)
        if not dummy_run:
            self.trees.keep(parents, input_batch.idx_mapping)
        # A node that could not be drafted still is a row of the next forward: any valid id will do.
        return token_ids[:, 1:].clamp(min=0)
