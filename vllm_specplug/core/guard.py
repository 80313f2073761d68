"""Checking drafts before they reach vLLM: if a proposer fails, decoding continues without its draft."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, TypeVar

import numpy as np
import torch

from vllm_specplug.proposer import DraftContext, as_draft
from vllm_specplug.types import PADDING, Draft, TokenTree
from vllm_specplug.utils.compiled import compiled

logger = logging.getLogger("vllm_specplug")

T = TypeVar("T")


class Guard:
    """Calls a proposer and checks its draft.  If it raises or the draft is invalid, the step has no draft of it.

    The first failure is logged with its reason, the others are only counted.
    """

    #: Failures of all guards of this process.
    total_failures: ClassVar[int] = 0

    def __init__(self, name: str):
        self.name = name
        self.failures = 0

    def __call__(
        self, propose: Callable[[], TokenTree | Draft], context: DraftContext, num_nodes: int | None = None
    ) -> Draft | None:
        """Call ``propose`` and check its draft.

        Args:
            propose: makes the draft.
            context: the requests to draft for.
            num_nodes: most nodes to keep of each tree; by default all.

        Returns:
            The checked draft, on the CPU, its root tokens set from ``context``; None if it failed.
        """
        return self.run(lambda: check_draft(as_draft(propose()), context, num_nodes))

    def check(self, draft: Callable[[], TokenTree | Draft | None], context: DraftContext) -> Draft | None:
        """Do the same for a drafter that may return None."""
        found = self.run(draft)
        return None if found is None else self(lambda: found, context)

    def run(self, call: Callable[[], T]) -> T | None:
        """Return the result of ``call``, None if it raises."""
        try:
            return call()
        except Exception as error:  # third-party code: whatever it raises, the server must keep decoding
            self.failures += 1
            Guard.total_failures += 1
            if self.failures == 1:
                logger.warning(
                    "vllm-specplug: proposer %r failed; such steps run without its draft (logged once): %s: %s",
                    self.name, type(error).__name__, error,
                )  # fmt: skip
            return None


def check_draft(draft: Draft, context: DraftContext, num_nodes: int | None) -> Draft:
    """Check a draft and copy it to the CPU: roots set, at most ``num_nodes`` nodes kept, the rest padded.

    Raises:
        ValueError: the draft is invalid; the message states why.
    """
    tree, num_reqs = draft.tree, len(context.request_ids)
    given = (tree.token_ids, tree.parents, tree.depths, tree.num_rows)
    token_ids, parents, depths, num_rows = arrays = [values.cpu().numpy() for values in given]
    log_values = draft.log_values.float().cpu().numpy()
    width = token_ids.shape[1] if token_ids.ndim == 2 else 0
    shape = (num_reqs, width)
    if width < 1 or not shape == token_ids.shape == parents.shape == depths.shape == log_values.shape:
        raise ValueError(f"the tree's tensors must be [num_reqs, num_rows]; num_reqs is {num_reqs}")
    integers = all(values.dtype.kind in "iu" for values in arrays)
    if num_rows.shape != (num_reqs,) or (not integers and ((num_rows < 1) | (num_rows > width)).any()):
        raise ValueError(_message(NUM_ROWS, width, context))
    if not integers:
        raise ValueError("token_ids, parents, depths and num_rows must be integers")
    error, *checked = _checked(
        *(np.ascontiguousarray(values, np.int64) for values in arrays),
        np.ascontiguousarray(log_values),
        np.ascontiguousarray(context.root_token_ids.numpy(), np.int64),
        np.ascontiguousarray(context.wanted.numpy(), np.bool_),
        width if num_nodes is None else num_nodes + 1,
        int(context.vocab_size),
    )
    if error:
        raise ValueError(_message(error, width, context))
    *rows, log_values = map(torch.from_numpy, checked)
    tree = TokenTree(*rows)
    bits = None if draft.source_bits is None else draft.source_bits.masked_fill(tree.parents == PADDING, 0)
    return replace(draft, tree=tree, log_values=log_values, source_bits=bits)


#: Errors of a draft, the first of which is reported.
NUM_ROWS, TOKEN_IDS, PARENTS, DEPTHS, LOG_VALUES, NO_ERROR = 1, 2, 3, 4, 5, 6


def _message(error: int, width: int, context: DraftContext) -> str:
    return {
        NUM_ROWS: f"num_rows must be [num_reqs], from 1 to {width}",
        TOKEN_IDS: f"token ids outside of 0 to {context.vocab_size - 1}",
        PARENTS: "the parent of a row must be a row above it",
        DEPTHS: "depths do not follow from the parents",
        LOG_VALUES: "log_values must be 0 at the root and never above the parent's",
    }[error]


@compiled
def _checked(
    token_ids: np.ndarray,
    parents: np.ndarray,
    depths: np.ndarray,
    num_rows: np.ndarray,
    log_values: np.ndarray,
    root_token_ids: np.ndarray,
    wanted: np.ndarray,
    max_rows: int,
    vocab_size: int,
) -> tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Find the first error of a draft; set the roots of copies, and turn the rows that are not kept into padding.

    Args:
        token_ids, parents, depths: int64 ``[num_reqs, width]``; any numbers.
        num_rows: int64 ``[num_reqs]``; any numbers.
        log_values: float32 ``[num_reqs, width]``; any numbers.
        root_token_ids: int64 ``[num_reqs]``.
        wanted: bool ``[num_reqs]``; where false only the root is kept.
        max_rows: rows to keep, at least 1.
        vocab_size: token ids must be below.

    Returns:
        The error, 0 if there is none, and copies of the first five arguments, which are useless with an error.
    """
    num_reqs, width = token_ids.shape
    new_ids, new_parents = np.full((num_reqs, width), PADDING, np.int64), np.full((num_reqs, width), PADDING, np.int64)
    new_depths = np.zeros((num_reqs, width), np.int64)
    new_values = np.full((num_reqs, width), np.float32(-np.inf), np.float32)
    kept = np.ones(num_reqs, np.int64)
    error = NO_ERROR
    for request in range(num_reqs):
        if not 1 <= num_rows[request] <= width:
            return NUM_ROWS, new_ids, new_parents, new_depths, kept, new_values
    for request in range(num_reqs):
        if depths[request, 0] != 0:
            error = min(error, DEPTHS)
        if log_values[request, 0] != 0:  # NaN, too
            error = min(error, LOG_VALUES)
        new_ids[request, 0], new_values[request, 0] = root_token_ids[request], 0.0
        if wanted[request]:
            kept[request] = min(num_rows[request], max_rows)
        for row in range(1, num_rows[request]):
            if not 0 <= token_ids[request, row] < vocab_size:
                error = min(error, TOKEN_IDS)
            parent = parents[request, row]
            if not 0 <= parent < row:
                error = min(error, PARENTS)
                continue
            if depths[request, row] != depths[request, parent] + 1:
                error = min(error, DEPTHS)
            if not log_values[request, row] <= log_values[request, parent]:  # false for NaN
                error = min(error, LOG_VALUES)
            if row < kept[request]:
                new_ids[request, row], new_parents[request, row] = token_ids[request, row], parent
                new_depths[request, row], new_values[request, row] = depths[request, row], log_values[request, row]
    return 0 if error == NO_ERROR else error, new_ids, new_parents, new_depths, kept, new_values
