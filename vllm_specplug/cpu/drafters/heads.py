"""Heads on the target's hidden states (``proposer.Heads``) on the V1 runner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_specplug.cpu.drafters.base import V1Drafter
from vllm_specplug.cpu.row_linear import row_linear_layers
from vllm_specplug.proposer import Heads
from vllm_specplug.proposers.eagle2.versions import VersionCheck
from vllm_specplug.types import Draft
from vllm_specplug.vllm.drafters.setup import make_heads


class NewHeads:
    """Another version of the heads, see ``base.NewVersion``.

    Args:
        drafter: takes them.
        folder: of the checkpoint.
    """

    def __init__(self, drafter: HeadsDrafter, folder: Path):
        self._drafter, self._folder = drafter, folder
        self._heads: Heads | None = None

    def prepare(self) -> None:
        config = self._drafter.vllm_config
        self._heads = make_heads(config, self._folder)
        with row_linear_layers(config.speculative_config.specplug.linear_rows):
            self._heads.load(self._drafter.target_model)

    def exchange(self) -> None:
        self._drafter.heads, self._heads = self._heads, self._drafter.heads


class HeadsDrafter(V1Drafter):
    """Drafts from the hidden state of each request's last accepted row."""

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any):
        super().__init__(vllm_config, device, runner)
        self.heads = make_heads(vllm_config)
        self._hidden: torch.Tensor | None = None

    def load_model(self, target_model: torch.nn.Module) -> None:
        self.target_model = target_model
        self.heads.load(target_model)

    def version_check(self, folder: str) -> VersionCheck:
        return VersionCheck(folder, self.vllm_config.model_config.model)

    def new_version(self, folder: Path, check: VersionCheck) -> NewHeads:
        check.read(folder)
        return NewHeads(self, folder)

    def before_draft(self, wanted: np.ndarray, hidden_states: torch.Tensor) -> None:
        self._hidden = hidden_states[self.plan.last_rows]

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        **_: Any,
    ) -> Draft:
        """Draft one tree per request."""
        requests = np.arange(len(sampled_token_ids))
        last = np.maximum(num_tokens_no_spec[requests] - 1, 0)
        roots = torch.from_numpy(token_ids_cpu[requests, last]).long().to(self._hidden.device)
        sampling = self.runner.draft_noise.sampling(self.heads.num_levels, 1)
        return self.heads.draft(roots, self._hidden, sampling, getattr(self.options, "node_floor", 0.0))
