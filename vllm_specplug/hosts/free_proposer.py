"""Proposers without a model of the host's: loaded through its ``custom_class`` method."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_specplug.proposer import DraftContext, find_method
from vllm_specplug.types import TokenTree


class HostFreeProposer:
    """Calls a registered proposer with what the host knows of each request."""

    def __init__(self, vllm_config: Any):
        options = vllm_config.speculative_config.specplug
        make = find_method(options.method).make
        if make is None:
            raise TypeError(f"method {options.method!r} has neither a proposer nor a drafter of the host")
        self._proposer = make(options)
        #: Attention layers of a draft model: there is none.
        self.draft_layers: dict[str, Any] = {}
        self.path_rows: torch.Tensor | None = None

    def load_model(self, _target_model: torch.nn.Module) -> None:
        """Nothing to load."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        **_: Any,
    ) -> TokenTree:
        """Draft one tree per request."""
        num_reqs = len(sampled_token_ids)
        token_ids = torch.from_numpy(token_ids_cpu[:num_reqs])
        num_tokens = torch.from_numpy(num_tokens_no_spec[:num_reqs]).long()
        roots = token_ids.gather(1, (num_tokens - 1).clamp(min=0).unsqueeze(1)).squeeze(1).long()
        return self._proposer.propose(DraftContext(roots, token_ids, num_tokens))
