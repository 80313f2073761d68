"""Harmonised objective distillation (HASS, section 3.1): the seven losses of the ablation in table 3.  And LK losses.

Each loss reads logits over the draft vocabulary, draft_logits and target_logits float32 [N, draft_vocab], and returns
one value per row, float32 [N]. q are the target's probabilities and p the drafter's (the paper's names), both over the
draft vocabulary. Top-K is the set of the target's K likeliest ids. Gradients flow to draft_logits only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

HarmonisedLoss = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]

TOP_P = 0.9  # joint probability that the set of the top-P loss must exceed
RANK_TEMPERATURE = 0.5  # scale of the logit differences in the recall loss's smooth ranks (tau_1)
RECALL_TEMPERATURE = 1.0  # number of ranks around K over which the recall loss fades (tau_2)
BILD_TEMPERATURE = 3.0
LK_ETA = 3.0  # how fast the LK loss lambda goes over from KL to acceptance; the authors' best value


def topk(draft_logits: torch.Tensor, target_logits: torch.Tensor, k: int) -> torch.Tensor:
    """Return the sum over top-K of -q log p; q is not renormalised (HASS, equation 1)."""
    q, ids = target_logits.softmax(-1).topk(k)
    return -(q * draft_logits.log_softmax(-1).gather(-1, ids)).sum(-1)


def topp(draft_logits: torch.Tensor, target_logits: torch.Tensor, k: int) -> torch.Tensor:
    """As top-K, over the likeliest ids whose joint probability just exceeds TOP_P; k is not used."""
    q, ids = target_logits.softmax(-1).sort(-1, descending=True)
    inside = q.cumsum(-1) - q <= TOP_P  # the likelier ids alone do not exceed TOP_P
    return -(q * inside * draft_logits.log_softmax(-1).gather(-1, ids)).sum(-1)


def topk_linear(draft_logits: torch.Tensor, target_logits: torch.Tensor, k: int) -> torch.Tensor:
    """As top-K, with q and p both divided by their sums over the set."""
    logits, ids = target_logits.topk(k)
    # A softmax over the set's logits equals the whole softmax divided by its sum over the set.
    return -(logits.softmax(-1) * draft_logits.gather(-1, ids).log_softmax(-1)).sum(-1)


def topk_softmax(draft_logits: torch.Tensor, target_logits: torch.Tensor, k: int) -> torch.Tensor:
    """As top-K, with softmaxes over the set of the probabilities q and p instead of q and p."""
    q, ids = target_logits.softmax(-1).topk(k)
    p = draft_logits.softmax(-1).gather(-1, ids)
    return -(q.softmax(-1) * p.log_softmax(-1)).sum(-1)


def bidirectional(draft_logits: torch.Tensor, target_logits: torch.Tensor, k: int) -> torch.Tensor:
    """As top-K, over the union of the target's and the drafter's K likeliest ids."""
    q = target_logits.softmax(-1)
    chosen = torch.zeros_like(q, dtype=torch.bool)
    for logits in (target_logits, draft_logits):
        chosen.scatter_(-1, logits.topk(k).indices, True)
    return -(q * chosen * draft_logits.log_softmax(-1)).sum(-1)


def recall(draft_logits: torch.Tensor, target_logits: torch.Tensor, k: int) -> torch.Tensor:
    """1 - smooth recall@K: the share of the target's top-K that is among the drafter's K likeliest ids.

    Patel et al. 2022, equations 6 and 7: an id's smooth rank is 1 + the sum of sigmoid(lead) over the other ids, where
    lead is how far their logits exceed its own; its recall is sigmoid(K - rank).
    """
    ids = target_logits.topk(k).indices
    recalled = []
    for column in ids.unbind(-1):
        lead = (draft_logits - draft_logits.gather(-1, column[:, None])) / RANK_TEMPERATURE
        rank = 0.5 + lead.sigmoid().sum(-1)  # the sum has the id itself, which adds one half
        recalled.append(((k - rank) / RECALL_TEMPERATURE).sigmoid())
    return 1 - torch.stack(recalled).mean(0)


def bild(draft_logits: torch.Tensor, target_logits: torch.Tensor, k: int) -> torch.Tensor:
    """Bi-directional logits difference (Li et al. 2024): rankings within the target's and within the drafter's top-K.

    The sum over both sets of the Kullback-Leibler divergence between the softmaxes of all pairwise logit differences.
    """
    first, second = torch.triu_indices(k, k, offset=1, device=draft_logits.device)
    loss = 0.0
    for leader in (target_logits, draft_logits):
        ids = leader.topk(k).indices
        target, draft = (logits.gather(-1, ids) / BILD_TEMPERATURE for logits in (target_logits, draft_logits))
        target = (target[:, first] - target[:, second]).log_softmax(-1)
        draft = (draft[:, first] - draft[:, second]).log_softmax(-1)
        loss = loss + F.kl_div(draft, target, reduction="none", log_target=True).sum(-1)
    return loss


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
    "topp": topp,
    "topk-linear": topk_linear,
    "topk-softmax": topk_softmax,
    "bidirectional": bidirectional,
    "recall": recall,
    "bild": bild,
    "lk-alpha": lk_alpha,
    "lk-lambda": lk_lambda,
}
