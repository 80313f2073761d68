"""Medusa heads on the V1 runner: no draft model of the host's, only the target's hidden states and LM head."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_specplug.hosts.drafters.base import CustomDrafter
from vllm_specplug.hosts.drafters.medusa import MedusaHeadsDrafter
from vllm_specplug.types import Draft


class MedusaProposer(CustomDrafter):
    """The runner hands it the hidden states it asks for."""

    def __init__(self, vllm_config: Any):
        super().__init__(vllm_config)
        self.heads = MedusaHeadsDrafter(vllm_config)
        #: ``[num_reqs, hidden_size]``: the hidden state of each request's last accepted row; set by the runner.
        self.hidden: torch.Tensor | None = None

    def load_model(self, target_model: torch.nn.Module) -> None:
        self.heads.load(target_model)

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
        assert self.hidden is not None
        roots = torch.from_numpy(token_ids_cpu[requests, last]).long().to(self.hidden.device)
        sampling = self.runner.draft_noise.sampling(self.heads.num_heads, 1)
        return self.heads.draft(roots, self.hidden, sampling, self.heads.options.node_floor)
