"""Which children a drafter proposes above temperature 0: sampled with noise, instead of the likeliest.

Two kinds of noise serve two verifications:

- *Coupled* (exact walk): the noise is the one that the target's sampler will use for the same token.  Both pick the
  largest ``log p + noise``, so where drafter and target agree about the distribution they agree about the sample too
  (Gumbel coupling).  The walk decides by the target alone, so the output does not depend on the noise drafted with.
- *Own* (multi-round rejection, ``rejection.py``): children are the ``draft_top_k`` largest ``log q + noise``, which is
  sampling without replacement from q in this order (Gumbel top-k).  There whether a node is kept must not depend on
  which token was sampled for it, else the output would be biased: its value is made from q alone, see ``round_values``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_specplug.core import tree_loops
from vllm_specplug.core.noise import gumbel_noise

#: Drafts are sampled from this many of the drafter's likeliest tokens.
CANDIDATES = 64

#: The drafter's error about log p, as the scale of the noise that tells how sure a coupled draft is.
COUPLED_SCALE = 1.0

#: A sampled draft is believed to be accepted with the chance that two draws from q agree, to this power.
POWER = 0.5

_NEVER = float("-inf")


@dataclass(frozen=True)
class Children:
    """Children of drafted nodes.

    Attributes:
        token_ids: int64 ``[num_nodes, draft_top_k]``, in the order of the draw.
        log_probs: float32 ``[num_nodes, draft_top_k]``; belief that the child is accepted where its parent is; -inf
            where there is no such child.
        candidate_ids: int64 ``[num_nodes, num_candidates]``; the tokens that could have been drawn; None where
            nothing was.
        candidate_probs: float32 ``[num_nodes, num_candidates]``; the probabilities they were drawn with.
    """

    token_ids: torch.Tensor
    log_probs: torch.Tensor
    candidate_ids: torch.Tensor | None = None
    candidate_probs: torch.Tensor | None = None


@dataclass(frozen=True)
class DraftSampling:
    """How one round drafts, request by request.

    Attributes:
        temperature: float32 ``[num_reqs]``; 0 drafts the likeliest tokens.
        top_k: int64 ``[num_reqs]``; the vocabulary's size where a request has none.
        top_p: float32 ``[num_reqs]``; 1 where a request has none.
        seeds: int64 ``[num_reqs, num_levels, width]``; noise of the children of node ``w`` of a level; ``width`` may be
            1, for all of them.
        coupled: bool ``[num_reqs]``; false where the noise is the drafter's own.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    seeds: torch.Tensor
    coupled: torch.Tensor

    def children(
        self, logits: torch.Tensor, level: int, draft_top_k: int, draft_ids: torch.Tensor | None = None
    ) -> Children:
        """Children of the nodes of one level.

        Args:
            logits: float ``[num_reqs * width, draft_vocab]``, request-major.
            level: of the nodes; the root's is 0.
            draft_top_k: children of each node.
            draft_ids: int64 ``[draft_vocab]``; target id of each draft id; None: the target's vocabulary.
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
        # As the sampler cuts: top_k, then the smallest set of the likeliest whose mass reaches top_p.
        places = torch.arange(scaled.shape[1], device=scaled.device)
        scaled = scaled.masked_fill(sampled & (places >= per_node(self.top_k)), _NEVER).softmax(dim=1)
        beyond = scaled.cumsum(dim=1) - scaled >= per_node(self.top_p)
        probs = scaled.masked_fill(sampled & beyond, 0.0)
        probs = probs / probs.sum(dim=1, keepdim=True)

        seeds = self.seeds[:, level, :width].expand(-1, width).flatten().unsqueeze(1)
        score = torch.where(sampled, probs.log() + gumbel_noise(seeds, ids), log_probs)
        best, order = score.topk(draft_top_k, dim=1)
        own = sampled & ~per_node(self.coupled)
        belief = torch.where(sampled, score / COUPLED_SCALE - (score / COUPLED_SCALE).logsumexp(1, True), log_probs)
        belief = torch.where(own, round_values(probs, draft_top_k), belief.gather(1, order))
        return Children(ids.gather(1, order), belief.masked_fill(best == _NEVER, _NEVER), ids, probs)


def round_values(probs: torch.Tensor, num_rounds: int) -> torch.Tensor:
    """Belief that the child drawn in each round is accepted, made from the distribution alone.

    A round is taken to accept the more often the narrower the distribution is (``POWER``); later rounds are reached
    where the earlier ones rejected.

    Args:
        probs: float32 ``[num_nodes, num_candidates]``.
        num_rounds: children of each node.

    Returns:
        float32 ``[num_nodes, num_rounds]``, falling: logs of the beliefs.
    """
    accepts = probs.square().sum(dim=1, keepdim=True).pow(POWER).clamp(max=0.999)
    rounds = torch.arange(num_rounds, device=probs.device)
    return accepts.log() + rounds * (1 - accepts).log()


def likeliest(logits: torch.Tensor, draft_top_k: int, draft_ids: torch.Tensor | None = None) -> Children:
    """Children at temperature 0: the likeliest tokens (arguments as of ``DraftSampling.children``)."""
    # One fused pass; logsumexp of a converted copy takes several times as long on a CPU.
    log_probs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    if logits.dim() == 2 and draft_top_k <= logits.shape[1] and tree_loops.is_cpu_without_autograd(logits):
        log_probs, ids = tree_loops.largest(log_probs, draft_top_k)
    else:
        log_probs, ids = log_probs.topk(draft_top_k, dim=-1)
    return Children(ids if draft_ids is None else draft_ids[ids], log_probs)


def stack_candidates(levels: list[Children], num_reqs: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Candidates and probabilities ``[num_reqs, num_nodes, num_candidates]`` of all nodes, level by level; or None."""
    if levels[0].candidate_ids is None:
        return None
    ids = [level.candidate_ids.unflatten(0, (num_reqs, -1)) for level in levels]
    probs = [level.candidate_probs.unflatten(0, (num_reqs, -1)) for level in levels]
    return torch.cat(ids, dim=1), torch.cat(probs, dim=1)
