"""One request's draft as the scheduler knows it: a flat list of tokens, with what the list does not say beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from vllm_specplug.types import Draft


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


def flatten(draft: Draft, rejected: Sequence[bool] | None = None) -> list[FlatDraft]:
    """Split the drafts of a batch by request; ``rejected`` marks those verified by rejection (default: none)."""
    tree, names, proposal = draft.tree, draft.source_names, draft.proposal
    sizes = tree.num_rows.tolist()
    token_ids, parents, log_values = tree.token_ids.tolist(), tree.parents.tolist(), draft.log_values.tolist()
    bits = [()] * len(sizes) if draft.source_bits is None else draft.source_bits.tolist()
    return [
        FlatDraft(
            token_ids[request][1:size],
            parents[request][1:size],
            log_values[request][1:size],
            [[name for s, name in enumerate(names) if word >> s & 1] for word in bits[request][1:size]],
            DrawnFrom(proposal.index[request, 1:size], proposal.token_ids[request], proposal.probs[request])
            if proposal is not None and rejected is not None and rejected[request]
            else None,
        )
        for request, size in enumerate(sizes)
    ]
