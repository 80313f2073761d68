"""Proposers without a model of the host's, driven by what the host knows of each request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vllm_specplug.config import TreeOptions
from vllm_specplug.core.guard import Guard
from vllm_specplug.core.tree import chain_tree
from vllm_specplug.hosts.drafters.base import CustomDrafter
from vllm_specplug.proposer import DraftContext, Proposer, Remembering, as_draft, find_method
from vllm_specplug.types import Draft

logger = logging.getLogger("vllm_specplug")

#: Rounds of the warm-up: by then each proposer has learned from what it drafted.
WARM_UP_ROUNDS = 24


class NoModelDrafter(CustomDrafter):
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


def warm_up(options: TreeOptions, make: Callable[[], Proposer], vocab_size: int) -> None:
    """Let a proposer made for this do all that one does, so that no request waits for a compiler.

    What fails here costs nothing: it fails again where it counts, and is counted and said there.
    """
    failures, was_disabled, began = Guard.total_failures, logger.disabled, time.perf_counter()
    logger.disabled = True
    try:
        with suppress(Exception):  # a third party's code, see ``Guard``
            _warm_up(options, make(), vocab_size)
    finally:
        Guard.total_failures, logger.disabled = failures, was_disabled
    seconds = time.perf_counter() - began
    if seconds > 1:
        logger.info("vllm-specplug: %r was warmed up in %.0f s", options.method, seconds)


def _warm_up(options: TreeOptions, proposer: Proposer, vocab_size: int) -> None:
    guard = Guard(options.method)
    whole = synthetic_context(2, 256, vocab_size)
    for step in range(WARM_UP_ROUNDS):
        # Answers of ended requests are looked up too.
        if step == WARM_UP_ROUNDS - 1 and isinstance(proposer, Remembering):
            guard.run(lambda: proposer.finish(whole.request_ids))
        count = 128 + 4 * step
        roots = whole.token_ids[:, count - 1].long()
        by_model = as_draft(chain_tree(roots, roots.unsqueeze(1), torch.ones_like(roots)))
        context = replace(
            whole,
            root_token_ids=roots,
            num_tokens=torch.full_like(roots, count),
            draft_by_model=lambda _, by_model=by_model: by_model,
        )
        guard(lambda context=context: proposer.propose(context), context, options.num_speculative_tokens)


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


class ModelFreeDrafting:
    """Calls a registered proposer with what the host knows of each request, and checks what it hands over."""

    def __init__(self, options: TreeOptions, proposer: Proposer, vocab_size: int):
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._num_nodes = options.num_speculative_tokens
        self._guard = Guard(options.method)
        self._host_guard = Guard(f"{options.method}: the host's drafter")

    @classmethod
    def of(cls, options: TreeOptions, vocab_size: int) -> ModelFreeDrafting | None:
        """For a method with a proposer of its own; None where the host's drafter is all there is."""
        make = find_method(options.method).make
        if make is None:
            return None
        warm_up(options, lambda: make(options), vocab_size)
        return cls(options, make(options), vocab_size)

    def propose(
        self, input_batch: Any, sampled: np.ndarray, draft_by_model: Callable[[torch.Tensor], Draft | None]
    ) -> Draft | None:
        """Draft one tree per request.

        Args:
            input_batch: the host's batch, its bookkeeping of this step done.
            sampled: bool ``[num_reqs]``; false for requests in the middle of their prefill.
            draft_by_model: runs the host's drafter (``NoModelDrafter`` gives None), see ``DraftContext``; where it
                raises, it has drafted nothing.

        Returns:
            The draft, or None where the proposer failed.
        """
        alone = context_of(input_batch, sampled, self._vocab_size)

        def guarded(expected: torch.Tensor) -> Draft | None:
            return self._host_guard.check(lambda: draft_by_model(expected), alone)

        context = replace(alone, draft_by_model=guarded)
        return self._guard(lambda: self._proposer.propose(context), context, self._num_nodes)

    def finish(self, request_ids: Collection[str]) -> None:
        """Tell the proposer which requests have ended."""
        proposer = self._proposer
        if request_ids and isinstance(proposer, Remembering):
            self._guard.run(lambda: proposer.finish(request_ids))
