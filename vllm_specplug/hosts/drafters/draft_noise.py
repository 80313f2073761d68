"""Which noise each request is drafted with above temperature 0, and generators for requests without a seed."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import torch
from vllm.v1.sample.sampler import Sampler

from vllm_specplug.config import TreeOptions, model_drafter
from vllm_specplug.core.draft_sampling import DraftSampling
from vllm_specplug.core.noise import SEED_RANGE, gumbel_noise, upcoming_seeds
from vllm_specplug.hosts.v1.settled_walk import is_plainly_sampled

logger = logging.getLogger("vllm_specplug")


def noise_is_known(sampler: Sampler) -> bool:
    """Whether the host's sampler draws the noise that ``noise.gumbel_noise`` gives: tried out on flat logits."""
    count, vocab_size = 16, 500
    generators = {row: torch.Generator().manual_seed(row) for row in range(count)}
    seeds = upcoming_seeds(list(generators.values()), 1)
    expected = gumbel_noise(seeds, torch.arange(vocab_size)).argmax(dim=1)
    drawn, _ = sampler.topk_topp_sampler(torch.zeros(count, vocab_size), generators, None, None)
    return torch.equal(drawn.long(), expected)


class DraftNoise:
    """Coupled noise for requests that are walked exactly, noise of its own where drafts are verified by rejection."""

    def __init__(self, runner: Any, options: TreeOptions, has_custom_processors: bool):
        self._runner = runner
        self._num_nodes = options.num_speculative_tokens
        #: Whether requests that can be are verified by rejection.
        self.rejects = options.verification == "rejection" and not has_custom_processors
        self.couples = options.verification != "typical" and getattr(model_drafter(options), "coupled", False)
        self.couples = self.couples and runner.may_couple
        if self.couples and not noise_is_known(runner.sampler):
            logger.warning("vllm-specplug: the host's sampler draws unknown noise: drafts are not coupled with it")
            self.couples = False
        self._own: dict[str, torch.Generator] = {}

    def finish(self, request_ids: Collection[str]) -> None:
        for req_id in request_ids:
            self._own.pop(req_id, None)

    def generators(self) -> dict[int, torch.Generator]:
        """Of the batch, by place: the requests' own, and ones of ours for requests without a seed."""
        batch = self._runner.input_batch
        if not (self.couples or self.rejects) or batch.all_greedy:
            return batch.generators
        found = dict(batch.generators)
        for place, req_id in enumerate(batch.req_ids):
            if place not in found and req_id not in batch.greedy_reqs:
                if req_id not in self._own:
                    # From the global generator, which the host seeds: a server's seed still says all that follows.
                    seed = int(torch.randint(0, SEED_RANGE, (1,)))
                    self._own[req_id] = torch.Generator().manual_seed(seed)
                found[place] = self._own[req_id]
        return found

    def rejected(self, num_reqs: int) -> list[bool]:
        """Whose drafts are verified by rejection."""
        return [self.rejects and self._can_reject(place) for place in range(num_reqs)]

    def sampling(self, num_levels: int, width: int) -> DraftSampling | None:
        """How to draft the next round; None: the likeliest tokens for all."""
        runner, batch = self._runner, self._runner.input_batch
        if not (self.couples or self.rejects) or batch.all_greedy:
            return None
        num_reqs, metadata = batch.num_reqs, batch.sampling_metadata
        found = self.generators()
        generators = [found.get(place) for place in range(num_reqs)]
        own = torch.tensor(self.rejected(num_reqs))
        temperature = metadata.temperature[:num_reqs]
        if not self.couples:
            temperature = temperature.where(own, 0.0)
        seeds = upcoming_seeds(generators, num_levels).unsqueeze(2).repeat(1, 1, width)
        for place in own.nonzero().flatten().tolist():
            seeds[place] = torch.randint(0, SEED_RANGE, (num_levels, width), generator=generators[place])
        vocab_size = runner.model_config.get_vocab_size()
        return DraftSampling(
            temperature=temperature,
            top_k=torch.full((num_reqs,), vocab_size) if metadata.top_k is None else metadata.top_k[:num_reqs].long(),
            top_p=torch.ones(num_reqs) if metadata.top_p is None else metadata.top_p[:num_reqs],
            seeds=seeds,
            coupled=~own,
        )

    def _can_reject(self, place: int) -> bool:
        """Whether a request's drafts may be verified by rejection.

        Near the end of the context drafts may be cut, which must not depend on what was sampled.
        """
        runner, batch = self._runner, self._runner.input_batch
        request = runner.requests[batch.req_ids[place]]
        if batch.num_tokens_no_spec[place] + self._num_nodes >= runner.max_model_len:
            return False
        return is_plainly_sampled(request.sampling_params)
