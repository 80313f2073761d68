"""Typical acceptance in the host's walk: the accepted tokens are settled first, the rest is sampled as ever."""

from __future__ import annotations

from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_specplug.config import TreeOptions
from vllm_specplug.hosts.sampling import SampledWalk
from vllm_specplug.types import TokenTree, Walk
from vllm_specplug.typical import accept_typical, path_token_ids, request_limits


def limits_of(params: SamplingParams | None, options: TreeOptions) -> tuple[float, float] | None:
    """Epsilon and delta of a request, or None where it is walked exactly.

    That is at temperature 0, where typical acceptance is greedy, and where anything but temperature, top_k and top_p
    shapes the distribution or its logprobs are asked for: those belong to sampled tokens.
    """
    if params is None or params.temperature < 1e-5:
        return None
    shaped = (
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty != 1.0,
        params.min_p,
        params.min_tokens,
        params.logit_bias,
        params.allowed_token_ids,
        params.bad_words,
        params.structured_outputs,
        params.thinking_token_budget is not None,
        params.logprobs is not None,
        params.logprob_token_ids,
    )
    return None if any(shaped) else request_limits(params.extra_args, options)


class TypicalWalk(SampledWalk):
    """Walks each request along the path that typical acceptance settles on, and from its end exactly."""

    def __init__(self, *args: Any, limits: list[tuple[float, float] | None]):
        super().__init__(*args)
        self.limits = limits
        self._settled = torch.empty(0)

    def __call__(
        self, tree: TokenTree, logits: torch.Tensor, first_rows: torch.Tensor, active: torch.Tensor
    ) -> tuple[Walk, SamplerOutput]:
        typical = torch.tensor([limits is not None for limits in self.limits]) & active
        epsilon, delta = torch.tensor([limits or (1.0, 1.0) for limits in self.limits]).unbind(1)

        def log_probs(requests: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            return self._log_probs(logits[first_rows[requests] + rows], requests)

        last_rows = accept_typical(tree, log_probs, epsilon, delta, typical)
        self._settled = path_token_ids(tree, last_rows)
        return super().__call__(tree, logits, first_rows, active)

    def _log_probs(self, logits: torch.Tensor, requests: torch.Tensor) -> torch.Tensor:
        """What the host's sampler draws from, given temperature, top_k and top_p."""
        metadata = self.sampling_metadata
        assert metadata.temperature is not None  # only where all requests are greedy
        logits = logits.float() / metadata.temperature[requests].unsqueeze(1)
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
