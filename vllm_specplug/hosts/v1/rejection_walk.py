"""Acceptance of sampled drafts by multi-round rejection sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vllm_specplug.core.rejection import accept_rejection
from vllm_specplug.hosts.drafters.flat_draft import FlatDraft
from vllm_specplug.hosts.v1.settled_walk import SettledWalk
from vllm_specplug.types import PADDING, Proposal, TokenTree


class RejectionWalk(SettledWalk):
    """Walks requests with sampled drafts by rejection sampling, the others exactly.

    Args:
        drafts: by request; None if only a part of the draft is verified.
    """

    def __init__(self, *args: Any, drafts: Sequence[FlatDraft | None]):
        super().__init__(*args)
        self.drafts = drafts

    def settle(
        self, tree: TokenTree, logits: torch.Tensor, first_rows: torch.Tensor, active: torch.Tensor
    ) -> torch.Tensor:
        sampled = torch.tensor([draft is not None and draft.drawn_from is not None for draft in self.drafts]) & active
        requests = torch.arange(len(active))
        if not sampled.any():
            return torch.full((len(active), 1), PADDING)

        def target_probs(rows: torch.Tensor) -> torch.Tensor:
            return self.log_probs(logits[first_rows + rows], requests).exp()

        max_depth = int(tree.depths.max())
        children = (tree.parents.unsqueeze(2) == torch.arange(tree.parents.shape[1])).sum(dim=1)
        shape = (max_depth, int(children.max()) + 1)
        uniform = torch.zeros(len(active), *shape, dtype=torch.float64)
        generators = self.sampling_metadata.generators
        for request in sampled.nonzero().flatten().tolist():
            uniform[request] = torch.rand(shape, dtype=torch.float64, generator=generators[request])
        proposal = _stack(self.drafts, tree)
        return accept_rejection(tree, proposal, target_probs, uniform, sampled, max_depth)


def _stack(drafts: Sequence[FlatDraft | None], tree: TokenTree) -> Proposal:
    """Stack the proposals of a batch, padded to the largest of them."""
    drawn = [draft.drawn_from if draft is not None else None for draft in drafts]
    index = torch.full_like(tree.parents, PADDING)
    shape = [max(d.token_ids.shape[axis] for d in drawn if d is not None) for axis in (0, 1)]
    token_ids, probs = torch.zeros(len(drafts), *shape, dtype=torch.int64), torch.zeros(len(drafts), *shape)
    for request, one in enumerate(drawn):
        if one is not None:
            index[request, 1 : len(one.index) + 1] = one.index
            token_ids[request, : one.token_ids.shape[0], : one.token_ids.shape[1]] = one.token_ids
            probs[request, : one.probs.shape[0], : one.probs.shape[1]] = one.probs
    return Proposal(index, token_ids, probs)
