"""A decode step on dense caches and a toy model: a model runner that fits on one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_specplug.core import step as S
from vllm_specplug.core.layout import lay_out
from vllm_specplug.core.walk import walk_exact
from vllm_specplug.types import TokenTree, TreeLayout, Walk


class Drafter(Protocol):
    def propose(self, root_token_ids: torch.Tensor) -> TokenTree:
        """Draft trees behind the last emitted tokens (int64 ``[num_reqs]``)."""

    def reseed(self, hidden: torch.Tensor, walk: Walk) -> None:
        """Read the target's hidden states ``[num_reqs, max_emitted, hidden_size]`` of the accepted rows."""


class Target(Protocol):
    def forward(
        self, token_ids: torch.Tensor, layout: TreeLayout, context_lens: torch.Tensor, caches: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the rows, writing row ``i`` at slot ``context_lens + i`` of every cache; logits and hidden states."""

    def sample(self, logits: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        """Sample as plain decoding does: token ids ``[num_reqs]`` from logits ``[num_reqs, vocab_size]``."""


def move_rows(cache_rows: torch.Tensor, plan: S.StepPlan, slot_mapping: torch.Tensor | None = None) -> torch.Tensor:
    """Move the accepted rows of a dense cache ``[num_slots, ...]``, in place.

    All sources are read before any target is written: a source may be another move's target.
    """
    moved = plan.source_rows != plan.target_rows
    sources, targets = plan.source_rows[moved], plan.target_rows[moved]
    if slot_mapping is not None:
        sources, targets = slot_mapping[sources], slot_mapping[targets]
    cache_rows[targets] = cache_rows[sources]
    return cache_rows


def rows_to_read(plan: S.StepPlan) -> torch.Tensor:
    """Return the flat rows whose hidden states the drafter reads."""
    return plan.source_rows.clamp(min=0)


@dataclass
class ReferenceRunner:
    """Runs decode steps on dense caches.

    Attributes:
        caches: keys and values of each layer, ``[num_reqs, max_len, ...]``, changed in place.
        context_lens: int64 ``[num_reqs]``; committed tokens, the root excluded.
    """

    drafter: Drafter
    target: Target
    caches: Sequence[torch.Tensor]
    context_lens: torch.Tensor

    def commit(self, plan: S.StepPlan) -> None:
        num_reqs = len(self.context_lens)
        columns = torch.arange(len(plan.path_index) // num_reqs)
        for cache in self.caches:
            slots = (torch.arange(num_reqs) * cache.shape[1] + self.context_lens).unsqueeze(1) + columns
            move_rows(cache.view(-1, *cache.shape[2:]), plan, slots.flatten())

    def step(self, root_token_ids: torch.Tensor) -> tuple[Walk, S.StepPlan]:
        """One decode step behind ``root_token_ids``, int64 ``[num_reqs]``."""
        tree = self.drafter.propose(root_token_ids)
        num_reqs, width = tree.token_ids.shape
        requests = torch.arange(num_reqs)
        layout = lay_out(tree, self.context_lens)
        logits, hidden = self.target.forward(tree.token_ids, layout, self.context_lens, self.caches)
        walk = walk_exact(tree, lambda rows, active, _: self.target.sample(logits[requests, rows], active))
        plan = S.plan_step(walk, requests * width, num_reqs * width)
        self.commit(plan)
        self.drafter.reseed(hidden.flatten(0, 1)[rows_to_read(plan)], walk)
        self.context_lens = self.context_lens + walk.num_emitted
        return walk, plan


def walk_tokens(
    tree: TokenTree,
    row_token_ids: torch.Tensor,
    active: torch.Tensor | None = None,
    static_depth: int | None = None,
    max_emitted: int | None = None,
) -> Walk:
    """Walk trees for which a token was already sampled at every row (greedy verification on a device).

    Args:
        tree: the verified trees.
        row_token_ids: int ``[num_reqs, num_rows]``; token sampled from each row's logits.
        active, static_depth, max_emitted: as in ``walk_exact``.
    """

    def look_up(rows: torch.Tensor, active: torch.Tensor, depth: int) -> torch.Tensor:
        return row_token_ids.gather(1, rows.unsqueeze(1)).squeeze(1)

    return walk_exact(tree, look_up, active, static_depth, max_emitted)
