"""Walks whose first tokens are chosen before vLLM's sampler runs: typical acceptance and rejection."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_specplug.hosts.ranks import agreed
from vllm_specplug.hosts.v1.sampled_walk import SampledWalk
from vllm_specplug.types import TokenTree, Walk


class SettledWalk(SampledWalk, ABC):
    """Emits the tokens that ``settle`` chooses, and continues exactly behind them."""

    _settled = torch.empty(0)

    @abstractmethod
    def settle(
        self, tree: TokenTree, logits: torch.Tensor, first_rows: torch.Tensor, active: torch.Tensor
    ) -> torch.Tensor:
        """Choose the first tokens to emit: int64 ``[num_reqs, any width]``, padded with ``PADDING``."""

    def __call__(
        self, tree: TokenTree, logits: torch.Tensor, first_rows: torch.Tensor, active: torch.Tensor
    ) -> tuple[Walk, SamplerOutput]:
        self._settled = agreed(self.settle(tree, logits, first_rows, active))
        return super().__call__(tree, logits, first_rows, active)

    def log_probs(self, logits: torch.Tensor, requests: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities that vLLM's sampler draws from, after temperature, top_k and top_p."""
        metadata = self.sampling_metadata
        assert metadata.temperature is not None  # None only if all requests are greedy
        temperature = metadata.temperature[requests]
        logits = logits.float() / temperature.where(temperature > 0, 1.0).unsqueeze(1)
        top_k = None if metadata.top_k is None else metadata.top_k[requests]
        top_p = None if metadata.top_p is None else metadata.top_p[requests]
        return torch.log_softmax(apply_top_k_top_p(logits, top_k, top_p), dim=-1)

    def _sample(self, logits: torch.Tensor, running: list[bool], depth: int) -> SamplerOutput:
        if depth >= self._settled.shape[1]:
            return super()._sample(logits, running, depth)
        settled = self._settled[:, depth]
        is_settled = settled >= 0
        drawing = [on and not done for on, done in zip(running, is_settled.tolist(), strict=True)]
        if not any(drawing) and self.sampling_metadata.max_num_logprobs is None:
            return SamplerOutput(settled.to(torch.int32).unsqueeze(1), None)
        output = super()._sample(logits, drawing, depth)
        sampled = output.sampled_token_ids
        output.sampled_token_ids = torch.where(is_settled.unsqueeze(1), settled.to(sampled.dtype).unsqueeze(1), sampled)
        return output
