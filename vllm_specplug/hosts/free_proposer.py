"""Proposers without a model of the host's, driven by what the host knows of each request."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vllm_specplug.config import TreeOptions
from vllm_specplug.guard import Guard
from vllm_specplug.hosts.drafter import CustomDrafter
from vllm_specplug.proposer import DraftContext, Proposer, Remembering, find_method
from vllm_specplug.types import Draft


class NoHostDrafter(CustomDrafter):
    """Stands where the host expects a drafter and leaves drafting to the runner."""

    def load_model(self, _target_model: torch.nn.Module) -> None:
        """Nothing to load."""

    def propose(self, *_: Any, **__: Any) -> None:
        """The runner drafts behind this: it knows the requests by id."""


def synthetic_context(num_reqs: int, max_len: int, vocab_size: int) -> DraftContext:
    """Requests of repetitive text, to time proposers with."""
    count = max(min(max_len, 512) - 1, 1)
    token_ids = torch.zeros(num_reqs, max_len, dtype=torch.int32)
    token_ids[:, :count] = torch.arange(count) % min(64, vocab_size)
    return DraftContext(
        root_token_ids=token_ids[:, count - 1].long(),
        token_ids=token_ids,
        num_tokens=torch.full((num_reqs,), count),
        request_ids=tuple(f"synthetic-{request}" for request in range(num_reqs)),
        wanted=torch.ones(num_reqs, dtype=torch.bool),
        vocab_size=vocab_size,
    )


def context_of(input_batch: Any, wanted: np.ndarray, vocab_size: int) -> DraftContext:
    """What the host knows of each request; ``wanted`` bool ``[num_reqs]``, see ``DraftContext``."""
    num_reqs = input_batch.num_reqs
    token_ids = torch.from_numpy(input_batch.token_ids_cpu[:num_reqs])
    num_tokens = torch.from_numpy(input_batch.num_tokens_no_spec[:num_reqs]).long()
    return DraftContext(
        root_token_ids=token_ids.gather(1, (num_tokens - 1).clamp(min=0).unsqueeze(1)).squeeze(1).long(),
        token_ids=token_ids,
        num_tokens=num_tokens,
        request_ids=tuple(input_batch.req_ids),
        wanted=torch.from_numpy(wanted),
        vocab_size=vocab_size,
    )


class HostFreeDrafting:
    """Calls a registered proposer with what the host knows of each request, and checks what it hands over."""

    def __init__(self, options: TreeOptions, proposer: Proposer, vocab_size: int):
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._num_nodes = options.num_speculative_tokens
        self._guard = Guard(options.method)
        self._host_guard = Guard(f"{options.method}: the host's drafter")

    @classmethod
    def of(cls, options: TreeOptions, vocab_size: int) -> HostFreeDrafting | None:
        """For a method with a proposer of its own; None where the host's drafter is all there is."""
        make = find_method(options.method).make
        return None if make is None else cls(options, make(options), vocab_size)

    def propose(
        self, input_batch: Any, sampled: np.ndarray, draft_by_host: Callable[[torch.Tensor], Draft | None]
    ) -> Draft | None:
        """Draft one tree per request.

        Args:
            input_batch: the host's batch, its bookkeeping of this step done.
            sampled: bool ``[num_reqs]``; false for requests in the middle of their prefill.
            draft_by_host: runs the host's drafter (``NoHostDrafter`` gives None), see ``DraftContext``; where it
                raises, it has drafted nothing.

        Returns:
            The draft, or None where the proposer failed.
        """
        alone = context_of(input_batch, sampled, self._vocab_size)

        def guarded(expected: torch.Tensor) -> Draft | None:
            return self._host_guard.check(lambda: draft_by_host(expected), alone)

        context = replace(alone, draft_by_host=guarded)
        return self._guard(lambda: self._proposer.propose(context), context, self._num_nodes)

    def finish(self, request_ids: Collection[str]) -> None:
        """Tell the proposer which requests have ended."""
        proposer = self._proposer
        if request_ids and isinstance(proposer, Remembering):
            self._guard.run(lambda: proposer.finish(request_ids))
