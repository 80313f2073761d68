"""One request's draft as the scheduler knows it: a flat list of tokens, with what the list does not say beside it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class DrawnFrom:
    """A request's part of a ``Proposal``, its rows being the nodes without the root."""

    index: torch.Tensor
    token_ids: torch.Tensor
    probs: torch.Tensor


@dataclass(frozen=True)
class FlatDraft:
    """A request's drafted nodes, the root left out: entry ``i`` is row ``i + 1`` of its tree.

    Attributes:
        token_ids: the nodes' tokens, parent-first.
        parents: row of each node's parent.
        log_values: see ``Draft``.
        sources: names of the proposers of each node; empty where there is only one proposer.
        drawn_from: the distributions that the nodes were drawn from; None if the tree is walked exactly.
    """

    token_ids: list[int]
    parents: list[int]
    log_values: list[float]
    sources: list[list[str]] = field(default_factory=list)
    drawn_from: DrawnFrom | None = None
