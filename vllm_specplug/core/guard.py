"""What a proposer hands over is checked before it reaches the host: a bad draft costs speed, nothing else."""

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
    """Calls a proposer; where it raises or hands over something that is no draft, there is no draft this time.

    The first failure is logged with its reason, the others are only counted.
    """

    #: Of all guards of this process.
    failures_of_all: ClassVar[int] = 0

    def __init__(self, name: str):
        self.name = name
        self.failures = 0

    def __call__(
        self, propose: Callable[[], TokenTree | Draft], context: DraftContext, num_nodes: int | None = None
    ) -> Draft | None:
        """Propose.

        Args:
            propose: makes the draft.
            context: what it drafts for.
            num_nodes: most nodes to keep of each tree; by default all.

        Returns:
            The checked draft, on the CPU, its roots set; None where it failed.
        """
        return self.run(lambda: _checked(as_draft(propose()), context, num_nodes))

    def check(self, draft: Callable[[], TokenTree | Draft | None], context: DraftContext) -> Draft | None:
        """The same for a drafter that may have nothing to say."""
        found = self.run(draft)
        return None if found is None else self(lambda: found, context)

    def run(self, call: Callable[[], T]) -> T | None:
        """The result of ``call``, None where it raises."""
        try:
            return call()
        except Exception as error:  # a third party's code: whatever it does, the server goes on decoding
            self.failures += 1
            Guard.failures_of_all += 1
            if self.failures == 1:
                logger.warning(
                    "vllm-specplug: proposer %r failed, its drafts are left out where it does (said once): %s: %s",
                    self.name, type(error).__name__, error,
                )  # fmt: skip
            return None


def _checked(draft: Draft, context: DraftContext, num_nodes: int | None) -> Draft:
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
        raise ValueError(_reason(NUM_ROWS, width, context))
    if not integers:
        raise ValueError("token_ids, parents, depths and num_rows must be integers")
    new_ids, new_parents, new_depths = (np.empty(shape, dtype=np.int64) for _ in range(3))
    new_values, kept = np.empty(shape, dtype=np.float32), np.empty(num_reqs, dtype=np.int64)
    fault = _copy(
        *(np.ascontiguousarray(values, dtype=np.int64) for values in arrays),
        np.ascontiguousarray(log_values),
        np.ascontiguousarray(context.root_token_ids.numpy(), dtype=np.int64),
        np.ascontiguousarray(context.wanted.numpy(), dtype=np.bool_),
        int(context.vocab_size),
        width if num_nodes is None else min(num_nodes + 1, width),
        new_ids,
        new_parents,
        new_depths,
        kept,
        new_values,
    )
    if fault:
        raise ValueError(_reason(fault, width, context))
    tree = TokenTree(*map(torch.from_numpy, (new_ids, new_parents, new_depths, kept)))
    bits = None if draft.source_bits is None else draft.source_bits.masked_fill(tree.parents == PADDING, 0)
    return replace(draft, tree=tree, log_values=torch.from_numpy(new_values), source_bits=bits)


#: What can be wrong with a draft's numbers, in the order in which it is said.
NUM_ROWS, TOKEN_IDS, PARENTS, DEPTHS, LOG_VALUES, NOTHING = 1, 2, 3, 4, 5, 6


def _reason(fault: int, width: int, context: DraftContext) -> str:
    return {
        NUM_ROWS: f"num_rows must be [num_reqs], from 1 to {width}",
        TOKEN_IDS: f"token ids outside of 0 to {context.vocab_size - 1}",
        PARENTS: "the parent of a row must be a row above it",
        DEPTHS: "depths do not follow from the parents",
        LOG_VALUES: "log_values must be 0 at the root and never above the parent's",
    }[fault]


@compiled
def _copy(
    token_ids: np.ndarray,
    parents: np.ndarray,
    depths: np.ndarray,
    num_rows: np.ndarray,
    log_values: np.ndarray,
    root_token_ids: np.ndarray,
    wanted: np.ndarray,
    vocab_size: int,
    most: int,
    new_ids: np.ndarray,
    new_parents: np.ndarray,
    new_depths: np.ndarray,
    kept: np.ndarray,
    new_values: np.ndarray,
) -> int:
    """Check the rows of a draft and copy those that are kept; what is wrong first, 0 where nothing is.

    Args:
        token_ids, parents, depths, num_rows: int64, the shapes of ``TokenTree``; any numbers.
        log_values: float32; as in ``Draft``; any numbers.
        root_token_ids: int64 ``[num_reqs]``.
        wanted: bool ``[num_reqs]``; where false the root alone is kept.
        vocab_size: token ids are below.
        most: rows to keep, at least 1.
        new_ids, new_parents, new_depths, kept, new_values: filled; shapes and dtypes as of the first five.
    """
    num_reqs, width = token_ids.shape
    for request in range(num_reqs):
        if not 1 <= num_rows[request] <= width:
            return NUM_ROWS
    fault = NOTHING
    for request in range(num_reqs):
        kept[request] = min(num_rows[request], most) if wanted[request] else 1
        if depths[request, 0] != 0:
            fault = min(fault, DEPTHS)
        if log_values[request, 0] != 0:  # NaN, too
            fault = min(fault, LOG_VALUES)
        new_ids[request, 0] = root_token_ids[request]
        new_parents[request, 0] = PADDING
        new_depths[request, 0] = 0
        new_values[request, 0] = 0.0
        for row in range(1, num_rows[request]):
            if not 0 <= token_ids[request, row] < vocab_size:
                fault = min(fault, TOKEN_IDS)
            parent = parents[request, row]
            if not 0 <= parent < row:
                fault = min(fault, PARENTS)
                continue
            if depths[request, row] != depths[request, parent] + 1:
                fault = min(fault, DEPTHS)
            if not log_values[request, row] <= log_values[request, parent]:  # NaN is not
                fault = min(fault, LOG_VALUES)
        for row in range(1, width):
            if row < kept[request]:
                new_ids[request, row] = token_ids[request, row]
                new_parents[request, row] = parents[request, row]
                new_depths[request, row] = depths[request, row]
                new_values[request, row] = log_values[request, row]
            else:
                new_ids[request, row] = PADDING
                new_parents[request, row] = PADDING
                new_depths[request, row] = 0
                new_values[request, row] = -np.inf
    return 0 if fault == NOTHING else fault
