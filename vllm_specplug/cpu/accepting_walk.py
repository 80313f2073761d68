"""Walks whose first tokens an acceptance rule chooses before vLLM's sampler runs: rejection and typical acceptance."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_specplug.core.rejection import accept_rejection
from vllm_specplug.core.typical import accept_typical, path_token_ids
from vllm_specplug.cpu.drafters.flat_draft import FlatDraft
from vllm_specplug.cpu.walk import SampledWalk
from vllm_specplug.types import PADDING, Proposal, TokenTree, Walk
from vllm_specplug.vllm.ranks import agreed


class AcceptingWalk(SampledWalk, ABC):
    """Emits the tokens that ``accept`` chooses, and continues exactly after them."""

    _accepted = torch.empty(0)

    @abstractmethod
    def accept(
        self, tree: TokenTree, logits: torch.Tensor, first_rows: torch.Tensor, active: torch.Tensor
    ) -> torch.Tensor:
        """Choose the first tokens to emit: int64 ``[num_reqs, any width]``, padded with ``PADDING``."""

    def __call__(
        self, tree: TokenTree, logits: torch.Tensor, first_rows: torch.Tensor, active: torch.Tensor
    ) -> tuple[Walk, SamplerOutput]:
        self._accepted = agreed(self.accept(tree, logits, first_rows, active))
        return super().__call__(tree, logits, first_rows, active)

    def log_probs(self, logits: torch.Tensor, requests: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities that vLLM's sampler draws from, after temperature, top_k and top_p."""
        metadata = self.sampling_metadata
        assert metadata.temperature is not None  # None only if all requests are greedy
        temperature = metadata.temperature[requests]
        logits = logits.float() / temperature.where(temperature > 0, 1.0).unsqueeze(1)
        top_k = None if metadata.top_k is None else metadata.top_k[requests]
        top_p = None if metadata.top_p is None else metadata.top_p[requests]
        return torch.log_softmax(apply_top_k_top_p(logits, top_k, top_p), dim=-1)

    def _sample(self, logits: torch.Tensor, running: list[bool], depth: int) -> SamplerOutput:
        if depth >= self._accepted.shape[1]:
            return super()._sample(logits, running, depth)
        accepted = self._accepted[:, depth]
        is_accepted = accepted >= 0
        drawing = [on and not done for on, done in zip(running, is_accepted.tolist(), strict=True)]
        if not any(drawing) and self.sampling_metadata.max_num_logprobs is None:
            return SamplerOutput(accepted.to(torch.int32).unsqueeze(1), None)
        output = super()._sample(logits, drawing, depth)
        sampled = output.sampled_token_ids
        output.sampled_token_ids = torch.where(
            is_accepted.unsqueeze(1), accepted.to(sampled.dtype).unsqueeze(1), sampled
        )
        return output


class RejectionWalk(AcceptingWalk):
    """Walks requests with sampled drafts by rejection sampling, the others exactly.

    Args:
        drafts: by request; None if only a part of the draft is verified.
    """

    def __init__(self, *args: Any, drafts: Sequence[FlatDraft | None]):
        super().__init__(*args)
        self.drafts = drafts

    def accept(
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
        return accept_rejection(tree, proposal, target_probs, uniform, sampled, max_depth, sync_is_cheap=True)


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


class TypicalWalk(AcceptingWalk):
    """Walks each request along the path that typical acceptance selects, and exactly after its end.

    Args:
        limits: by request, see ``plain_sampling.limits_of``.
    """

    def __init__(self, *args: Any, limits: list[tuple[float, float] | None]):
        super().__init__(*args)
        self.limits = limits

    def accept(
        self, tree: TokenTree, logits: torch.Tensor, first_rows: torch.Tensor, active: torch.Tensor
    ) -> torch.Tensor:
        typical = torch.tensor([limits is not None for limits in self.limits]) & active
        epsilon, delta = torch.tensor([limits or (1.0, 1.0) for limits in self.limits]).unbind(1)

        def log_probs(requests: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            return self.log_probs(logits[first_rows[requests] + rows], requests)

        last_rows = accept_typical(tree, log_probs, epsilon, delta, typical)
        return path_token_ids(tree, last_rows)
