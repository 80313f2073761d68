"""Model-free proposers on the V1 runner: called with the tokens of each request, checked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vllm_specplug.config import TreeOptions
from vllm_specplug.core.guard import Guard
from vllm_specplug.proposer import DraftContext, Proposer, Remembering, find_method
from vllm_specplug.types import Draft

logger = logging.getLogger("vllm_specplug")

#: ``draft_by_model(expected)``: ``expected`` float ``[num_reqs]``, see ``DraftContext``, or None without other drafts.
DraftByModel = Callable[["torch.Tensor | None"], "Draft | None"]


def context_of(
    input_batch: Any, wanted: np.ndarray, vocab_size: int, namespaces: Mapping[str, int] | None = None
) -> DraftContext:
    """Make the context from vLLM's batch.

    Args:
        input_batch: vLLM's.
        wanted: bool ``[num_reqs]``, see ``DraftContext``.
        vocab_size: the target's.
        namespaces: by request; None where nothing is shared.
    """
    num_reqs = input_batch.num_reqs
    token_ids = input_batch.token_ids_cpu[:num_reqs]
    num_tokens = input_batch.num_tokens_no_spec[:num_reqs].astype(np.int64)
    roots = token_ids[np.arange(num_reqs), np.maximum(num_tokens - 1, 0)].astype(np.int64)
    return DraftContext(
        root_token_ids=torch.from_numpy(roots),
        token_ids=torch.from_numpy(token_ids),
        num_tokens=torch.from_numpy(num_tokens),
        prompt_lens=torch.from_numpy(input_batch.num_prompt_tokens[:num_reqs].astype(np.int64)),
        namespaces=torch.tensor([namespaces[req_id] if namespaces else 0 for req_id in input_batch.req_ids]),
        request_ids=tuple(input_batch.req_ids),
        wanted=torch.from_numpy(wanted),
        vocab_size=vocab_size,
    )


class ModelOnlyDrafting:
    """Drafts with the drafter with weights alone."""

    def __init__(self, options: TreeOptions, vocab_size: int):
        self._vocab_size, self._guard = vocab_size, Guard(options.method)

    def propose(self, input_batch: Any, wanted: np.ndarray, draft_by_model: DraftByModel) -> Draft | None:
        """Draft one tree per request; see ``ModelFreeDrafting``."""
        context = context_of(input_batch, wanted, self._vocab_size)
        return self._guard.check(lambda: draft_by_model(None), context)

    def add(self, request_id: str, namespace: int) -> None:
        """Nothing is kept for a request."""

    def finish(self, request_ids: Collection[str]) -> None:
        """Nothing is kept for a request."""


class ModelFreeDrafting:
    """Calls a registered proposer with the tokens of each request, and checks what it returns."""

    def __init__(self, options: TreeOptions, proposer: Proposer, vocab_size: int):
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._num_nodes = options.num_speculative_tokens
        self._namespaces: dict[str, int] = {}
        self._guard = Guard(options.method)
        self._model_guard = Guard(f"{options.method}: the drafter with weights")

    def propose(self, input_batch: Any, wanted: np.ndarray, draft_by_model: DraftByModel) -> Draft | None:
        """Draft one tree per request.

        Args:
            input_batch: vLLM's batch, its bookkeeping of this step done.
            wanted: bool ``[num_reqs]``; false for requests whose draft is not used.
            draft_by_model: runs the drafter with weights, see ``DraftContext``.  If it raises, it has drafted nothing.

        Returns:
            The draft, or None if the proposer failed.
        """
        alone = context_of(input_batch, wanted, self._vocab_size, self._namespaces)

        def guarded(expected: torch.Tensor) -> Draft | None:
            return self._model_guard.check(lambda: draft_by_model(expected), alone)

        context = replace(alone, draft_by_model=guarded)
        return self._guard(lambda: self._proposer.propose(context), context, self._num_nodes)

    def add(self, request_id: str, namespace: int) -> None:
        """Take notice of a new request, or of a session's next turn."""
        self._namespaces[request_id] = namespace

    def finish(self, request_ids: Collection[str]) -> None:
        """Tell the proposer which requests have ended."""
        proposer = self._proposer
        if request_ids and isinstance(proposer, Remembering):
            self._guard.run(lambda: proposer.finish(request_ids))
        for request_id in request_ids:
            self._namespaces.pop(request_id, None)


def make_drafting(options: TreeOptions, vocab_size: int) -> ModelOnlyDrafting | ModelFreeDrafting:
    """Make what runs the method's proposers."""
    make = find_method(options.method).make
    if make is None:
        return ModelOnlyDrafting(options, vocab_size)
    return ModelFreeDrafting(options, make(options), vocab_size)
