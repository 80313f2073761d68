"""What a proposer hands over is checked before it reaches the host: a bad draft costs speed, nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from vllm_specplug.proposer import DraftContext, as_draft
from vllm_specplug.tree import truncate, valid_rows
from vllm_specplug.types import PADDING, Draft, TokenTree

logger = logging.getLogger("vllm_specplug")

T = TypeVar("T")


class Guard:
    """Calls a proposer; where it raises or hands over something that is no draft, there is no draft this time.

    The first failure is logged with its reason, the others are only counted.
    """

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

    def run(self, call: Callable[[], T]) -> T | None:
        """The result of ``call``, None where it raises."""
        try:
            return call()
        except Exception as error:  # a third party's code: whatever it does, the server goes on decoding
            self.failures += 1
            if self.failures == 1:
                logger.warning(
                    "vllm-specplug: proposer %r failed, its drafts are left out where it does (said once): %s: %s",
                    self.name, type(error).__name__, error,
                )  # fmt: skip
            return None


def _checked(draft: Draft, context: DraftContext, num_nodes: int | None) -> Draft:
    tree, num_reqs = draft.tree, len(context.request_ids)
    token_ids, parents, num_rows = (values.long().cpu() for values in (tree.token_ids, tree.parents, tree.num_rows))
    depths, log_values = tree.depths.long().cpu(), draft.log_values.float().cpu()
    width = token_ids.shape[1] if token_ids.dim() == 2 else 0
    shape = (num_reqs, width)
    if width < 1 or any(values.shape != shape for values in (token_ids, parents, depths, log_values)):
        raise ValueError(f"tensors of shape {tuple(token_ids.shape)} and others for {num_reqs} requests")
    if num_rows.shape != (num_reqs,) or bool(((num_rows < 1) | (num_rows > width)).any()):
        raise ValueError(f"num_rows must be int [num_reqs] of 1 to {width}")
    rows = torch.arange(width)
    nodes = valid_rows(num_rows, width) & (rows > 0)
    if bool((nodes & ((token_ids < 0) | (token_ids >= context.vocab_size))).any()):
        raise ValueError(f"token ids outside of 0 to {context.vocab_size - 1}")
    if bool((nodes & ((parents < 0) | (parents >= rows))).any()):
        raise ValueError("a parent must be a row above its child's")
    parent = parents.masked_fill(~nodes, 0)
    if bool((nodes & (depths != depths.gather(1, parent) + 1)).any()) or bool((depths[:, 0] != 0).any()):
        raise ValueError("depths do not follow from the parents")
    if bool((nodes & ~(log_values <= log_values.gather(1, parent))).any()) or bool((log_values[:, 0] != 0).any()):
        raise ValueError("a value above its parent's, or not a number")
    token_ids = token_ids.clone()
    token_ids[:, 0] = context.root_token_ids
    kept = num_rows.clamp(max=width if num_nodes is None else num_nodes + 1).where(context.wanted.cpu(), 1)
    tree = truncate(TokenTree(token_ids, parents.masked_fill(rows == 0, PADDING), depths, num_rows), kept)
    padding = ~valid_rows(tree.num_rows, width)
    bits = None if draft.source_bits is None else draft.source_bits.masked_fill(padding, 0)
    return replace(draft, tree=tree, log_values=log_values.masked_fill(padding, float("-inf")), source_bits=bits)
