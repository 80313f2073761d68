"""One decode step: propose -> lay out -> verify -> walk -> commit -> re-seed.

A host splits the step at its own forward: it calls ``before_forward``, runs its model, and calls ``after_forward``.
``reference_step`` is the same step on one page, with a dense cache and a toy model, for readers and tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_specplug.core.kv import apply_moves, plan_moves
from vllm_specplug.core.layout import lay_out
from vllm_specplug.core.seed import Reseed, plan_reseed
from vllm_specplug.core.walk import Sample, walk_exact
from vllm_specplug.types import KvMoves, TokenTree, TreeLayout, Walk


@dataclass(frozen=True)
class StepPlan:
    """All that follows from one walk.

    Attributes:
        walk: emitted tokens and their rows.
        moves: key/value copies that commit the accepted path.
        reseed: the drafter's run over the accepted tokens.
    """

    walk: Walk
    moves: KvMoves
    reseed: Reseed


def before_forward(tree: TokenTree, context_lens: torch.Tensor, max_depth: int | None = None) -> TreeLayout:
    """Place the trees behind their contexts (``context_lens`` int ``[num_reqs]``, the root excluded)."""
    return lay_out(tree, context_lens, max_depth)


def after_forward(
    tree: TokenTree,
    sample: Sample,
    row_start: torch.Tensor,
    active: torch.Tensor | None = None,
    static_depth: int | None = None,
) -> StepPlan:
    """Walk the verified trees and plan what follows.

    Args:
        tree: the verified trees.
        sample: samples one token per request from the logits of given rows, see ``walk.Sample``.
        row_start: int ``[num_reqs]``; flat row of each request's root in the forward.
        active: bool ``[num_reqs]``; requests to walk, by default all.
        static_depth: a depth that no tree exceeds; then nothing is read back from the device.
    """
    walk = walk_exact(tree, sample, active, static_depth)
    return StepPlan(walk, plan_moves(walk, row_start), plan_reseed(walk, row_start))


class Drafter(Protocol):
    """Draft side of ``reference_step``."""

    def propose(self, root_token_ids: torch.Tensor) -> TokenTree:
        """Draft trees behind the last emitted tokens (int64 ``[num_reqs]``)."""

    def reseed(self, hidden: torch.Tensor, plan: Reseed) -> None:
        """Take in the target's hidden states ``[num_reqs, max_emitted, hidden_size]`` of the accepted rows."""


class Target(Protocol):
    """Target side of ``reference_step``."""

    def forward(
        self, token_ids: torch.Tensor, layout: TreeLayout, context_lens: torch.Tensor, caches: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the rows, writing row ``i`` at slot ``context_lens + i`` of every cache.

        Returns:
            Logits ``[num_reqs, num_rows, vocab_size]`` and hidden states ``[num_reqs, num_rows, hidden_size]``.
        """

    def sample(self, logits: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        """Plain decoding's sampler: token ids ``[num_reqs]`` from logits ``[num_reqs, vocab_size]``."""


def reference_step(
    drafter: Drafter,
    target: Target,
    root_token_ids: torch.Tensor,
    context_lens: torch.Tensor,
    caches: Sequence[torch.Tensor],
) -> StepPlan:
    """One decode step on dense caches.

    Args:
        drafter: proposes the trees.
        target: the model to be equal to.
        root_token_ids: int64 ``[num_reqs]``; last emitted tokens.
        context_lens: int64 ``[num_reqs]``; committed tokens, the root excluded; the caller adds ``num_emitted``.
        caches: keys and values of each layer, ``[num_reqs, max_len, ...]``, changed in place.
    """
    # Propose.
    tree = drafter.propose(root_token_ids)
    num_reqs, width = tree.token_ids.shape
    requests = torch.arange(num_reqs, device=tree.token_ids.device)

    # Lay out, verify.
    layout = before_forward(tree, context_lens)
    logits, hidden = target.forward(tree.token_ids, layout, context_lens, caches)

    # Walk.
    def sample(rows: torch.Tensor, active: torch.Tensor, depth: int) -> torch.Tensor:
        return target.sample(logits[requests, rows], active)

    plan = after_forward(tree, sample, row_start=requests * width)

    # Commit: rows of the forward are flat over requests; so are the slots of a dense cache.
    rows = torch.arange(width, device=requests.device)
    for cache in caches:
        slots = (requests * cache.shape[1] + context_lens).unsqueeze(1) + rows
        apply_moves(cache.view(-1, *cache.shape[2:]), plan.moves, slots.flatten())

    # Re-seed.
    drafter.reseed(hidden.flatten(0, 1)[plan.reseed.source_rows], plan.reseed)
    return plan
