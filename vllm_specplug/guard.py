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
    # numpy: on small arrays its calls cost a fraction of torch's.
    token_ids, parents, depths, num_rows = (
        values.cpu().numpy() for values in (tree.token_ids, tree.parents, tree.depths, tree.num_rows)
    )
    log_values = draft.log_values.float().cpu().numpy()
    width = token_ids.shape[1] if token_ids.ndim == 2 else 0
    if width < 1 or any(values.shape != (num_reqs, width) for values in (token_ids, parents, depths, log_values)):
        raise ValueError(f"the tree's tensors must be [num_reqs, num_rows]; num_reqs is {num_reqs}")
    if num_rows.shape != (num_reqs,) or ((num_rows < 1) | (num_rows > width)).any():
        raise ValueError(f"num_rows must be [num_reqs], from 1 to {width}")
    if any(values.dtype.kind not in "iu" for values in (token_ids, parents, depths, num_rows)):
        raise ValueError("token_ids, parents, depths and num_rows must be integers")
    rows = np.arange(width)
    nodes = (rows < num_rows[:, None]) & (rows > 0)
    if (nodes & ((token_ids < 0) | (token_ids >= context.vocab_size))).any():
        raise ValueError(f"token ids outside of 0 to {context.vocab_size - 1}")
    if (nodes & ((parents < 0) | (parents >= rows))).any():
        raise ValueError("the parent of a row must be a row above it")
    parents = np.where(nodes, parents, 0)
    if (nodes & (depths != np.take_along_axis(depths, parents, 1) + 1)).any() or depths[:, 0].any():
        raise ValueError("depths do not follow from the parents")
    falling = log_values <= np.take_along_axis(log_values, parents, 1)  # false for NaN
    if (nodes & ~falling).any() or log_values[:, 0].any():
        raise ValueError("log_values must be 0 at the root and never above the parent's")

    most = width if num_nodes is None else min(num_nodes + 1, width)
    kept = np.where(context.wanted.numpy(), np.minimum(num_rows, most), 1)
    nodes &= rows < kept[:, None]
    token_ids = np.where(nodes, token_ids, PADDING).astype(np.int64)
    token_ids[:, 0] = context.root_token_ids.numpy()
    log_values = np.where(nodes, log_values, -np.inf).astype(np.float32)
    log_values[:, 0] = 0.0
    tree = TokenTree(
        *map(torch.from_numpy, (token_ids, np.where(nodes, parents, PADDING), np.where(nodes, depths, 0), kept))
    )
    bits = None if draft.source_bits is None else draft.source_bits.masked_fill(torch.from_numpy(~nodes), 0)
    return replace(draft, tree=tree, log_values=torch.from_numpy(log_values), source_bits=bits)
