"""Which requests can be verified otherwise than exactly, on both model runners."""

from __future__ import annotations

from vllm.sampling_params import SamplingParams

from vllm_specplug.config import TreeOptions
from vllm_specplug.core.request_args import request_limits


def is_plainly_sampled(params: SamplingParams | None) -> bool:
    """Whether temperature (above 0), top_k and top_p alone define the distribution, and no logprobs are requested.

    Logprobs are computed by the sampler, for the tokens that it samples; at temperature 0 the walk is greedy.
    """
    if params is None or params.temperature < 1e-5:
        return False
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
    return not any(shaped)


def limits_of(params: SamplingParams | None, options: TreeOptions) -> tuple[float, float] | None:
    """Return epsilon and delta of a request, or None if it is walked exactly.

    It is walked exactly at temperature 0, where typical acceptance is greedy, and with parameters other than those that
    ``is_plainly_sampled`` allows.
    """
    if not is_plainly_sampled(params):
        return None
    return request_limits(params.extra_args, options)
