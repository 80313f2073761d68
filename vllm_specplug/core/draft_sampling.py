"""Choosing the children of drafted nodes: the likeliest tokens, or sampled ones above temperature 0.

Sampling adds Gumbel noise to the log probabilities and takes the largest sums.  The noise depends on the verification:

- *Coupled* noise, for the exact walk: the noise that the target's sampler will use for the same token.  If drafter and
  target have the same distribution, they then pick the same token (Gumbel coupling).  The walk depends on the target
  alone, so the output does not depend on the noise used for drafting.
- *Independent* noise, for multi-candidate rejection (``rejection.py``): the children are the ``draft_top_k`` largest
  ``log q + noise``, which samples them without replacement from the draft distribution q in this order (Gumbel top-k).
  Whether a node is kept must not depend on the token that was sampled for it, or the output would be biased.  Its
  value therefore comes from q alone, see ``acceptance_log_probs``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_specplug.core.noise import gumbel_noise
from vllm_specplug.core.pool import NEVER

#: Children are sampled from this many of the drafter's likeliest tokens.
CANDIDATES = 64

#: Estimated acceptance of a sampled draft: the probability that two draws from q agree, to this power.
POWER = 0.5


@dataclass(frozen=True)
class Children:
    """Children of drafted nodes.

    Attributes:
        token_ids: int64 ``[num_nodes, draft_top_k]``, in the order of the draw.
        log_probs: float32 ``[num_nodes, draft_top_k]``; estimated log probability that the child is accepted if its
            parent is; -inf where there is no such child.
        candidate_ids: int64 ``[num_nodes, num_candidates]``; the tokens that the children were sampled from; None if
            they were not sampled.
        candidate_probs: float32 ``[num_nodes, num_candidates]``; their probabilities.
    """

    token_ids: torch.Tensor
    log_probs: torch.Tensor
    candidate_ids: torch.Tensor | None = None
    candidate_probs: torch.Tensor | None = None


@dataclass(frozen=True)
class DraftSampling:
    """How each request drafts in one step.

    Attributes:
        temperature: float32 ``[num_reqs]``; 0 drafts the likeliest tokens.
        top_k: int64 ``[num_reqs]``; the vocabulary's size where a request has none.
        top_p: float32 ``[num_reqs]``; 1 where a request has none.
        seeds: int64 ``[num_reqs, num_levels, width]``; seeds the noise of the children of node ``w`` of a level; with
            ``width`` 1 all nodes of a level share a seed.
        coupled: bool ``[num_reqs]``; false for independent noise.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    seeds: torch.Tensor
    coupled: torch.Tensor

    def children(
        self, logits: torch.Tensor, level: int, draft_top_k: int, draft_ids: torch.Tensor | None = None
    ) -> Children:
        """Choose the children of the nodes of one level.

        Args:
            logits: float ``[num_reqs * width, draft_vocab]``, request-major.
            level: level of the nodes; 0 for the root.
            draft_top_k: children per node.
            draft_ids: int64 ``[draft_vocab]``; target id of each draft id; None if both vocabularies are the same.
        """
        width = logits.shape[0] // len(self.temperature)

        def per_node(values: torch.Tensor) -> torch.Tensor:
            return values.repeat_interleave(width).unsqueeze(1)

        log_probs, ids = torch.log_softmax(logits, dim=-1, dtype=torch.float32).topk(
            min(max(CANDIDATES, draft_top_k), logits.shape[1]), dim=-1
        )
        ids = ids if draft_ids is None else draft_ids[ids]
        temperature = per_node(self.temperature)
        sampled = temperature > 0
        scaled = log_probs / temperature.where(sampled, 1.0)
        # Truncate as the sampler does: top_k, then the smallest set of the likeliest whose mass reaches top_p.
        ranks = torch.arange(scaled.shape[1], device=scaled.device)
        scaled = scaled.masked_fill(sampled & (ranks >= per_node(self.top_k)), NEVER).softmax(dim=1)
        beyond = scaled.cumsum(dim=1) - scaled >= per_node(self.top_p)
        probs = scaled.masked_fill(sampled & beyond, 0.0)
        probs = probs / probs.sum(dim=1, keepdim=True)

        score = torch.where(sampled, probs.log() + self.noise(level, width, ids), log_probs)
        best, order = score.topk(draft_top_k, dim=1)
        independent = sampled & ~per_node(self.coupled)
        estimates = torch.where(sampled, score - score.logsumexp(1, True), log_probs).gather(1, order)
        estimates = torch.where(independent, acceptance_log_probs(probs, draft_top_k), estimates)
        return Children(ids.gather(1, order), estimates.masked_fill(best == NEVER, NEVER), ids, probs)

    def noise(self, level: int, width: int, token_ids: torch.Tensor) -> torch.Tensor:
        """Compute the Gumbel noise of the children of a level's nodes, float like ``token_ids``
        (``[num_reqs * width, num_candidates]``, request-major)."""
        seeds = self.seeds[:, level, :width].expand(-1, width).flatten().unsqueeze(1)
        return gumbel_noise(seeds, token_ids)


def acceptance_log_probs(probs: torch.Tensor, num_children: int) -> torch.Tensor:
    """Estimate from the draft distribution alone how likely each sampled child is to be accepted.

    Children are tried in the order of the draw.  The narrower the distribution, the more often a try accepts
    (``POWER``); a later child is tried only if the earlier ones were rejected.

    Args:
        probs: float32 ``[num_nodes, num_candidates]``.
        num_children: children per node.

    Returns:
        float32 ``[num_nodes, num_children]``; log probabilities, falling.
    """
    accepts = probs.square().sum(dim=1, keepdim=True).pow(POWER).clamp(max=0.999)
    num_rejected = torch.arange(num_children, device=probs.device)
    return accepts.log() + num_rejected * (1 - accepts).log()


def likeliest(logits: torch.Tensor, draft_top_k: int, draft_ids: torch.Tensor | None = None) -> Children:
    """Choose the likeliest tokens (temperature 0); arguments as in ``DraftSampling.children``."""
    # One fused pass; logsumexp of a converted copy takes several times as long on a CPU.
    log_probs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    log_probs, ids = log_probs.topk(draft_top_k, dim=-1)
    return Children(ids if draft_ids is None else draft_ids[ids], log_probs)


def stack_candidates(levels: list[Children], num_reqs: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Stack the candidates and probabilities of all nodes, level by level; None if the children were not sampled.

    Returns:
        Token ids and probabilities, each ``[num_reqs, num_nodes, num_candidates]``.
    """
    ids, probs = [], []
    for level in levels:
        if level.candidate_ids is None or level.candidate_probs is None:
            return None
        ids.append(level.candidate_ids.unflatten(0, (num_reqs, -1)))
        probs.append(level.candidate_probs.unflatten(0, (num_reqs, -1)))
    return torch.cat(ids, dim=1), torch.cat(probs, dim=1)
