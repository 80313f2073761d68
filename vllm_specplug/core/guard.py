"""Checking drafts before they reach vLLM: if a proposer fails, decoding continues without its draft."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, TypeVar

import numpy as np
import torch

from vllm_specplug.core.pool import NEVER
from vllm_specplug.core.tree import padded_tree, valid_rows
from vllm_specplug.proposer import DraftContext, as_draft
from vllm_specplug.types import PADDING, Draft, TokenTree

logger = logging.getLogger("vllm_specplug")

T = TypeVar("T")


class RankFailed(SystemExit):
    """Ends the process of a rank.

    Of an ``Exception`` vLLM hears only if it is the first rank's: another rank would go on with the trees that it had.
    """


class Guard:
    """Calls a proposer and checks its draft.  If it raises or the draft is invalid, the step has no draft of it.

    The first failure is logged with its reason, the others are only counted.

    Args:
        name: of the proposer.
        raises: end the process: where other ranks go on with drafts of their own, this rank cannot go on without.
    """

    #: Failures of all guards of this process.
    total_failures: ClassVar[int] = 0

    def __init__(self, name: str, raises: bool = False):
        self.name, self.raises = name, raises
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
        """Return the result of ``call``, None if it raises and ``raises`` is not set.

        Raises:
            RankFailed: it raises, and ``raises`` is set.
        """
        try:
            return call()
        except Exception as error:  # third-party code: whatever it raises, the server must keep decoding
            self.failures += 1
            Guard.total_failures += 1
            if self.raises:
                logger.exception("vllm-specplug: proposer %r failed; other ranks may have drafts: all stop", self.name)
                raise RankFailed(1) from error
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
    if error := _first_error(token_ids, parents, depths, num_rows, log_values, int(context.vocab_size)):
        raise ValueError(_message(error, width, context))
    tree, kept_values = _kept_rows(arrays, log_values, context, width if num_nodes is None else num_nodes + 1)
    bits = None if draft.source_bits is None else draft.source_bits.masked_fill(tree.parents == PADDING, 0)
    return replace(draft, tree=tree, log_values=kept_values, source_bits=bits)


#: Errors of a draft, the first of which is reported.
NUM_ROWS, TOKEN_IDS, PARENTS, DEPTHS, LOG_VALUES = 1, 2, 3, 4, 5


def _message(error: int, width: int, context: DraftContext) -> str:
    return {
        NUM_ROWS: f"num_rows must be [num_reqs], from 1 to {width}",
        TOKEN_IDS: f"token ids outside of 0 to {context.vocab_size - 1}",
        PARENTS: "the parent of a row must be a row above it",
        DEPTHS: "depths do not follow from the parents",
        LOG_VALUES: "log_values must be 0 at the root and never above the parent's",
    }[error]


def _first_error(
    token_ids: np.ndarray,
    parents: np.ndarray,
    depths: np.ndarray,
    num_rows: np.ndarray,
    log_values: np.ndarray,
    vocab_size: int,
) -> int:
    """Find the first error of a draft, 0 if there is none; all values may be any numbers.

    Args:
        token_ids, parents, depths: integers ``[num_reqs, width]``.
        num_rows: integers ``[num_reqs]``.
        log_values: float32 ``[num_reqs, width]``.
        vocab_size: token ids must be below.
    """
    width = token_ids.shape[1]
    if ((num_rows < 1) | (num_rows > width)).any():
        return NUM_ROWS
    rows = np.arange(width)
    is_node = (rows > 0) & (rows < num_rows[:, None])
    if (is_node & ((token_ids < 0) | (token_ids >= vocab_size))).any():
        return TOKEN_IDS
    if (is_node & ((parents < 0) | (parents >= rows))).any():
        return PARENTS
    above = np.where(is_node, parents, 0).astype(np.int64)
    if depths[:, 0].any() or (is_node & (depths != np.take_along_axis(depths, above, 1) + 1)).any():
        return DEPTHS
    falls = log_values <= np.take_along_axis(log_values, above, 1)  # false for NaN
    if (log_values[:, 0] != 0).any() or (is_node & ~falls).any():
        return LOG_VALUES
    return 0


def _kept_rows(
    arrays: list[np.ndarray], log_values: np.ndarray, context: DraftContext, max_rows: int
) -> tuple[TokenTree, torch.Tensor]:
    """Copy a draft without errors: roots set; of requests that are not wanted only the root kept, else ``max_rows``."""
    token_ids, parents, depths, num_rows = (torch.from_numpy(values.astype(np.int64)) for values in arrays)
    kept = num_rows.clamp(max=max_rows).where(context.wanted, 1)
    token_ids[:, 0], parents[:, 0] = context.root_token_ids, PADDING
    tree = padded_tree(token_ids, parents, depths, kept)
    return tree, torch.from_numpy(log_values).masked_fill(~valid_rows(kept, token_ids.shape[1]), NEVER)
