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
    token_ids, parents, depths, num_rows = arrays = [
        values.cpu().numpy() for values in (tree.token_ids, tree.parents, tree.depths, tree.num_rows)
    ]
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
    # Copies, edited in place below: a proposer may keep its tensors.
    new_rows, new_values = np.empty((3, *shape), dtype=np.int64), np.array(log_values, order="C")
    new_rows[0], new_rows[1], new_rows[2] = token_ids, parents, depths
    kept = np.array(num_rows, dtype=np.int64)
    error = _find_error(new_rows, kept, new_values, int(context.vocab_size))
    if error:
        raise ValueError(_message(error, width, context))
    _trim(
        new_rows,
        kept,
        new_values,
        np.ascontiguousarray(context.root_token_ids.numpy(), dtype=np.int64),
        np.ascontiguousarray(context.wanted.numpy(), dtype=np.bool_),
        width if num_nodes is None else num_nodes + 1,
    )
    tree = TokenTree(*torch.from_numpy(new_rows), torch.from_numpy(kept))
    bits = None if draft.source_bits is None else draft.source_bits.masked_fill(tree.parents == PADDING, 0)
    return replace(draft, tree=tree, log_values=torch.from_numpy(new_values), source_bits=bits)


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
def _find_error(rows: np.ndarray, num_rows: np.ndarray, log_values: np.ndarray, vocab_size: int) -> int:
    """Return the first error of a draft, 0 if there is none.

    Args:
        rows: int64 ``[3, num_reqs, num_rows]``; token ids, parents and depths; any numbers.
        num_rows: int64 ``[num_reqs]``; any numbers.
        log_values: float32 ``[num_reqs, num_rows]``; any numbers.
        vocab_size: token ids must be below.
    """
    token_ids, parents, depths = rows[0], rows[1], rows[2]
    num_reqs, width = token_ids.shape
    for request in range(num_reqs):
        if not 1 <= num_rows[request] <= width:
            return NUM_ROWS
    error = NO_ERROR
    for request in range(num_reqs):
        if depths[request, 0] != 0:
            error = min(error, DEPTHS)
        if log_values[request, 0] != 0:  # NaN, too
            error = min(error, LOG_VALUES)
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
    return 0 if error == NO_ERROR else error


@compiled
def _trim(
    rows: np.ndarray,
    num_rows: np.ndarray,
    log_values: np.ndarray,
    root_token_ids: np.ndarray,
    wanted: np.ndarray,
    max_rows: int,
) -> None:
    """Set the roots of a valid draft and turn the rows that are not kept into padding, in place.

    Args:
        rows, num_rows, log_values: as ``_find_error`` takes them.
        root_token_ids: int64 ``[num_reqs]``.
        wanted: bool ``[num_reqs]``; where false only the root is kept.
        max_rows: rows to keep, at least 1.
    """
    for request in range(len(num_rows)):
        kept = min(num_rows[request], max_rows) if wanted[request] else 1
        num_rows[request] = kept
        rows[0, request, 0], rows[1, request, 0], log_values[request, 0] = root_token_ids[request], PADDING, 0.0
        rows[:2, request, kept:] = PADDING
        rows[2, request, kept:] = 0
        log_values[request, kept:] = -np.inf
