"""Losses of the draft distribution: HASS's top-K loss (section 3.1) and the LK losses (arXiv 2602.23881).

Each loss reads logits over the draft vocabulary, draft_logits and target_logits float32 [N, draft_vocab], and returns
one value per row, float32 [N]. q are the target's probabilities and p the drafter's (the paper's names), both over the
draft vocabulary. Top-K is the set of the target's K likeliest ids. Gradients flow to draft_logits only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

HarmonisedLoss = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]

LK_ETA = 3.0  # how fast the LK loss lambda goes over from KL to acceptance; the authors' best value


def topk(draft_logits: torch.Tensor, target_logits: torch.Tensor, k: int) -> torch.Tensor:
    """Return the sum over top-K of -q log p; q is not renormalised (HASS, equation 1)."""
    q, ids = target_logits.softmax(-1).topk(k)
    return -(q * draft_logits.log_softmax(-1).gather(-1, ids)).sum(-1)


def lk_alpha(draft_logits: torch.Tensor, target_logits: torch.Tensor, k: int) -> torch.Tensor:
    """Return -log alpha, alpha being the acceptance rate at temperature 1 (LK losses, 2602.23881); k is not used."""
    return -_acceptance(draft_logits, target_logits).log()


def lk_lambda(draft_logits: torch.Tensor, target_logits: torch.Tensor, k: int) -> torch.Tensor:
    """Return a mean of KL(q, p) and 1 - alpha (2602.23881); the larger alpha, the more 1 - alpha; k is not used."""
    acceptance = _acceptance(draft_logits, target_logits)
    share = torch.exp(-LK_ETA * acceptance.detach())
    log_p, log_q = draft_logits.log_softmax(-1), target_logits.log_softmax(-1)
    divergence = F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)
    return share * divergence + (1 - share) * (1 - acceptance)


def _acceptance(draft_logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    """Return the probability that rejection sampling accepts a draft: the sum over ids of the smaller of p and q."""
    smaller = torch.minimum(draft_logits.softmax(-1), target_logits.softmax(-1)).sum(-1)
    return smaller.clamp(min=torch.finfo(smaller.dtype).tiny)


LOSSES: dict[str, HarmonisedLoss] = {
    "topk": topk,
    "lk-alpha": lk_alpha,
    "lk-lambda": lk_lambda,
}
