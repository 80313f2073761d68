"""Losses of a drafter: feature regression, and soft cross-entropy through an LM head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

# Rows whose logits exist at the same time:
CHUNK = 512  # by default
SPARSE_CHUNK = 256  # if the target's logits are not needed
AUTOGRAD_CHUNK = 64  # if autograd keeps several copies of the logits


def feature_loss(predicted: torch.Tensor, target: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Smooth L1 loss, mean over the hidden size, weighted sum over rows: [N, h], [N, h], [N] -> scalar."""
    per_row = F.smooth_l1_loss(predicted.float(), target.float(), reduction="none").mean(-1)
    return (per_row * weights).sum()


def distillation_loss(
    predicted: torch.Tensor,
    target: torch.Tensor,
    lm_head: torch.Tensor,
    weights: torch.Tensor,
    topk: int = 0,
    topk_weight: float = 0.0,
    harmonised: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor] | None = None,
    target_head: torch.Tensor | None = None,
) -> torch.Tensor:
    """Weighted sum over rows of the soft cross-entropy over the draft vocabulary.

    The target's distribution is renormalised over the draft vocabulary.

    Args:
        predicted, target: features [N, h] of the drafter and of the target.
        lm_head: [draft_vocab, h], the drafter's.
        weights: float32 [N].
        topk, topk_weight: weight of HASS's loss: the same sum over the target's `topk` likeliest ids only, whose
            probabilities are not renormalised.
        harmonised: replaces HASS's loss: (draft_logits, target_logits, topk) -> [n], with logits [n, draft_vocab] (see
            proposers/hass/losses.py).
        target_head: [draft_vocab, h], the target's LM head if the drafter has its own (EAGLE-3), which then gets a
            gradient; None: `lm_head` is the target's and gets no gradient.
    """
    return _Distillation.apply(predicted, target, lm_head, weights, topk, topk_weight, harmonised, target_head)


@torch.no_grad()
def likeliest(features: torch.Tensor, lm_head: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's `topk` likeliest draft ids after each feature, int64 [N, topk], and their probabilities, float32.

    features [N, h]; lm_head [draft_vocab, h]. The probabilities are renormalised over the `topk` ids.
    """
    best = [(rows.to(lm_head.dtype) @ lm_head.T).topk(min(topk, lm_head.shape[0])) for rows in features.split(CHUNK)]
    if not best:
        empty = features.new_empty(0, topk, dtype=torch.float32)
        return empty.long(), empty
    return torch.cat([rows.indices for rows in best]), torch.cat([rows.values.float().softmax(-1) for rows in best])


def sparse_distillation_loss(
    predicted: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor, lm_head: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Weighted sum over rows of the cross-entropy with labels that are `probs` at `ids` (of `likeliest`), 0 elsewhere.

    predicted [N, h]; ids, probs [N, topk]; lm_head [draft_vocab, h], which gets a gradient if it requires one; weights
    float32 [N]. It costs about half of `distillation_loss` for one drafter, a third if heads share the labels (Medusa).
    """
    return _SparseDistillation.apply(predicted, ids, probs, lm_head, weights)


class _ChunkedLoss(torch.autograd.Function):
    """A loss whose `forward` computes the gradients chunk by chunk, so that [N, draft_vocab] never exists."""

    @staticmethod
    def keep(ctx, grad: torch.Tensor, lm_head: torch.Tensor, head_index: int, head_grad: torch.Tensor | None) -> None:
        """Keep the gradients of input 0, the features, and of input `head_index`, the LM head (or None)."""
        ctx.save_for_backward(grad, head_grad)
        ctx.head_index, ctx.head_dtype = head_index, lm_head.dtype

    @staticmethod
    def backward(ctx, grad_output):
        grad, head_grad = ctx.saved_tensors
        gradients = [None] * len(ctx.needs_input_grad)
        gradients[0] = grad * grad_output.to(grad.dtype)
        if head_grad is not None:
            gradients[ctx.head_index] = (head_grad * grad_output).to(ctx.head_dtype)
        return tuple(gradients)


class _SparseDistillation(_ChunkedLoss):
    @staticmethod
    def forward(ctx, predicted, ids, probs, lm_head, weights):
        total = torch.zeros((), device=predicted.device)
        grad = torch.empty_like(predicted)
        head_grad = torch.zeros_like(lm_head, dtype=torch.float32) if ctx.needs_input_grad[3] else None
        for start in range(0, predicted.shape[0], SPARSE_CHUNK):
            rows = slice(start, start + SPARSE_CHUNK)
            inputs, weight = predicted[rows].to(lm_head.dtype), weights[rows, None]
            log_probs = (inputs @ lm_head.T).float().log_softmax(-1)
            total -= (log_probs.gather(-1, ids[rows]) * probs[rows] * weight).sum()
            # d/dlogits of -sum(p log softmax) = softmax - p, since p sums to 1
            log_grad = log_probs.exp_().scatter_add_(-1, ids[rows], -probs[rows]).mul_(weight).to(lm_head.dtype)
            grad[rows] = (log_grad @ lm_head).to(grad.dtype)
            if head_grad is not None:
                head_grad += log_grad.T @ inputs
        _ChunkedLoss.keep(ctx, grad, lm_head, 3, head_grad)
        return total


class _Distillation(_ChunkedLoss):
    @staticmethod
    def forward(ctx, predicted, target, lm_head, weights, topk, topk_weight, harmonised, target_head):
        total = torch.zeros((), device=predicted.device)
        grad = torch.empty_like(predicted)
        own_head = target_head is not None
        head_grad = torch.zeros_like(lm_head, dtype=torch.float32) if own_head else None
        target_head = target_head if own_head else lm_head
        chunk = min(CHUNK, AUTOGRAD_CHUNK) if harmonised and topk_weight else CHUNK
        for start in range(0, predicted.shape[0], chunk):
            rows = slice(start, start + chunk)
            target_logits = (target[rows].to(target_head.dtype) @ target_head.T).float()
            draft_logits = (predicted[rows].to(lm_head.dtype) @ lm_head.T).float()
            weight = weights[rows, None]
            extra_grad = None
            if harmonised and topk_weight:
                extra, extra_grad = _with_gradient(harmonised, draft_logits, target_logits, topk, weight[:, 0])
                total += topk_weight * extra
            target_probs = target_logits.softmax(-1)
            mass = 1.0
            if topk_weight and not harmonised:
                probs, ids = target_probs.topk(topk)
                target_probs.scatter_(-1, ids, probs * (1 + topk_weight))
                mass = 1 + topk_weight * probs.sum(-1, keepdim=True)
            log_probs = draft_logits.log_softmax(-1)
            total -= (torch.linalg.vecdot(target_probs, log_probs) * weight[:, 0]).sum()
            # d/dlogits of -sum(p log softmax) = softmax * sum(p) - p
            log_grad = log_probs.exp_().mul_(mass).sub_(target_probs).mul_(weight)
            if extra_grad is not None:
                log_grad.add_(extra_grad, alpha=topk_weight)
            log_grad = log_grad.to(lm_head.dtype)
            grad[rows] = (log_grad @ lm_head).to(grad.dtype)
            if own_head:
                head_grad += log_grad.T @ predicted[rows].to(lm_head.dtype)
        _ChunkedLoss.keep(ctx, grad, lm_head, 2, head_grad)
        return total


def _with_gradient(harmonised, draft_logits, target_logits, topk, weights):
    """The weighted sum of a chunk's harmonised loss, and its gradient with respect to draft_logits."""
    with torch.enable_grad():
        leaf = draft_logits.detach().requires_grad_()
        loss = (harmonised(leaf, target_logits, topk) * weights).sum()
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]
