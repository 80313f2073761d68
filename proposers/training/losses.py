"""Losses of a feature drafter: feature regression plus soft cross-entropy through the target's LM head."""

from __future__ import annotations

import torch
from torch.nn import functional as F

CHUNK = 512  # rows whose logits exist at one time


def feature_loss(predicted: torch.Tensor, target: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Smooth L1, mean over the hidden size, weighted sum over rows: [N, h], [N, h], [N] -> scalar."""
    per_row = F.smooth_l1_loss(predicted.float(), target.float(), reduction="none").mean(-1)
    return (per_row * weights).sum()


def distillation_loss(
    predicted: torch.Tensor,
    target: torch.Tensor,
    lm_head: torch.Tensor,
    weights: torch.Tensor,
    topk: int = 0,
    topk_weight: float = 0.0,
) -> torch.Tensor:
    """Weighted sum over rows of the soft cross-entropy over the rows of `lm_head` (the draft vocabulary).

    predicted, target: features [N, h]; lm_head [draft_vocab, h]; weights [N]. The target's distribution is
    renormalised over the draft vocabulary. `topk_weight` adds HASS's term: the same sum over the target's `topk`
    likeliest ids only, their probabilities not renormalised.
    """
    return _Distillation.apply(predicted, target, lm_head, weights, topk, topk_weight)


class _Distillation(torch.autograd.Function):
    """Computes loss and gradient chunk by chunk, so [N, draft_vocab] never exists; no gradient for the LM head."""

    @staticmethod
    def forward(ctx, predicted, target, lm_head, weights, topk, topk_weight):
        total = torch.zeros(())
        grad = torch.empty_like(predicted)
        for start in range(0, predicted.shape[0], CHUNK):
            rows = slice(start, start + CHUNK)
            target_probs = (target[rows].to(lm_head.dtype) @ lm_head.T).float().softmax(-1)
            mass = 1.0
            if topk_weight:
                probs, ids = target_probs.topk(topk)
                target_probs.scatter_(-1, ids, probs * (1 + topk_weight))
                mass = 1 + topk_weight * probs.sum(-1, keepdim=True)
            log_probs = (predicted[rows].to(lm_head.dtype) @ lm_head.T).float().log_softmax(-1)
            weight = weights[rows, None]
            total -= (torch.linalg.vecdot(target_probs, log_probs) * weight[:, 0]).sum()
            # d/dlogits of -sum(p log softmax) = softmax * sum(p) - p
            log_grad = log_probs.exp_().mul_(mass).sub_(target_probs).mul_(weight)
            grad[rows] = (log_grad.to(lm_head.dtype) @ lm_head).to(grad.dtype)
        ctx.save_for_backward(grad)
        return total

    @staticmethod
    def backward(ctx, grad_output):
        (grad,) = ctx.saved_tensors
        return grad * grad_output.to(grad.dtype), None, None, None, None, None
