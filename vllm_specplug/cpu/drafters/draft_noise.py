"""The noise that drafts use above temperature 0, and generators for requests without a seed."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import torch
from vllm.v1.sample.sampler import Sampler

from vllm_specplug.config import TreeOptions, model_drafter
from vllm_specplug.core.draft_sampling import DraftSampling
from vllm_specplug.core.noise import SEED_RANGE, gumbel_noise, upcoming_seeds
from vllm_specplug.vllm.plain_sampling import is_plainly_sampled

logger = logging.getLogger("vllm_specplug")


def noise_is_known(sampler: Sampler) -> bool:
    """Return whether vLLM's sampler draws the noise of ``noise.gumbel_noise``, by a trial on flat logits."""
    count, vocab_size = 16, 500
    generators = {row: torch.Generator().manual_seed(row) for row in range(count)}
    seeds = upcoming_seeds(list(generators.values()), 1)
    expected = gumbel_noise(seeds, torch.arange(vocab_size)).argmax(dim=1)
    drawn, _ = sampler.topk_topp_sampler(torch.zeros(count, vocab_size), generators, None, None)
    return torch.equal(drawn.long(), expected)


class DraftNoise:
    """Coupled noise for requests that are walked exactly; separate noise for requests verified by rejection."""

    def __init__(self, runner: Any, options: TreeOptions, has_custom_processors: bool):
        self._runner = runner
        self._num_nodes = options.num_speculative_tokens
        #: Whether requests are verified by rejection if they can be.
        self.rejects = options.verification == "rejection" and not has_custom_processors
        self.couples = options.verification != "typical" and getattr(model_drafter(options), "coupled", False)
        if self.couples and not noise_is_known(runner.sampler):
            logger.warning(
                "vllm-specplug: drafts are not coupled with the sampler's noise, because this vLLM draws it differently"
            )
            self.couples = False
        self._own: dict[str, torch.Generator] = {}

    def finish(self, request_ids: Collection[str]) -> None:
        for req_id in request_ids:
            self._own.pop(req_id, None)

    def generators(self) -> dict[int, torch.Generator]:
        """Return the generator per batch index: the request's own if seeded, else one created here."""
        batch = self._runner.input_batch
        found = dict(batch.generators)
        for index, req_id in enumerate(batch.req_ids):
            if index not in found and req_id not in batch.greedy_reqs:
                if req_id not in self._own:
                    # From the global generator, which vLLM seeds: the server's seed still determines all tokens.
                    seed = int(torch.randint(0, SEED_RANGE, (1,)))
                    self._own[req_id] = torch.Generator().manual_seed(seed)
                found[index] = self._own[req_id]
        return found

    def rejected(self, num_reqs: int) -> list[bool]:
        """Return per batch index whether its drafts are verified by rejection."""
        return [self.rejects and self._can_reject(index) for index in range(num_reqs)]

    def sampling(self, num_levels: int, width: int) -> DraftSampling | None:
        """Return how to sample the next draft; None: take the likeliest tokens for all requests."""
        if not self._runner.samples_drafts:
            return None
        runner, batch = self._runner, self._runner.input_batch
        num_reqs, metadata = batch.num_reqs, batch.sampling_metadata
        found = self.generators()
        generators = [found.get(index) for index in range(num_reqs)]
        own = torch.tensor(self.rejected(num_reqs))
        temperature = metadata.temperature[:num_reqs]
        if not self.couples:
            temperature = temperature.where(own, 0.0)
        seeds = upcoming_seeds(generators, num_levels).unsqueeze(2).repeat(1, 1, width)
        for index in own.nonzero().flatten().tolist():
            seeds[index] = torch.randint(0, SEED_RANGE, (num_levels, width), generator=generators[index])
        vocab_size = runner.model_config.get_vocab_size()
        return DraftSampling(
            temperature=temperature,
            top_k=torch.full((num_reqs,), vocab_size) if metadata.top_k is None else metadata.top_k[:num_reqs].long(),
            top_p=torch.ones(num_reqs) if metadata.top_p is None else metadata.top_p[:num_reqs],
            seeds=seeds,
            coupled=~own,
        )

    def _can_reject(self, index: int) -> bool:
        """Return whether a request's drafts can be verified by rejection.

        Near the end of the context drafts may be truncated, and that must not depend on the sampled tokens.
        """
        runner, batch = self._runner, self._runner.input_batch
        request = runner.requests[batch.req_ids[index]]
        if batch.num_tokens_no_spec[index] + self._num_nodes >= runner.max_model_len:
            return False
        return is_plainly_sampled(request.sampling_params)
