"""Heads on the target's hidden states (``proposer.Heads``) on the V1 runner."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_specplug.config import model_drafter
from vllm_specplug.hosts.drafters.base import V1Drafter, target_info
from vllm_specplug.proposer import Heads, find_method
from vllm_specplug.types import Draft
from vllm_specplug.utils.lazy import load


def make_heads(vllm_config: Any) -> Heads:
    """Make the heads that the configured method names; their weights are not loaded yet."""
    options = model_drafter(vllm_config.speculative_config.specplug)
    return load(find_method(options.method).model.heads)(options, target_info(vllm_config.model_config))


class HeadsDrafter(V1Drafter):
    """Drafts from the hidden state of each request's last accepted row."""

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any):
        super().__init__(vllm_config, device, runner)
        self.heads = make_heads(vllm_config)
        self._hidden: torch.Tensor | None = None

    def load_model(self, target_model: torch.nn.Module) -> None:
        self.heads.load(target_model)

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
