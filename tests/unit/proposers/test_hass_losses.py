"""The top-K loss and the LK losses: cases computed by hand, and the chunked loss with its gradient."""

import math

import pytest
import torch

from vllm_specplug.proposers.hass import losses as hass
from vllm_specplug.proposers.training import losses

Q = torch.tensor([[0.5, 0.3, 0.15, 0.05]])  # target
P = torch.tensor([[0.1, 0.2, 0.3, 0.4]])  # drafter: its top-2 are the target's bottom two


def value(name: str, k: int = 2) -> float:
    # Adding a constant to all logits changes nothing.
    return hass.LOSSES[name](P.log() + 3.0, Q.log() - 1.0, k).item()


def test_topk():
    assert value("topk") == pytest.approx(-(0.5 * math.log(0.1) + 0.3 * math.log(0.2)))


def test_lk_losses():
    acceptance = 0.1 + 0.2 + 0.15 + 0.05  # the smaller of P and Q
    assert value("lk-alpha") == pytest.approx(-math.log(acceptance))
    divergence = (Q * (Q.log() - P.log())).sum().item()
    share = math.exp(-3 * acceptance)
    assert value("lk-lambda") == pytest.approx(share * divergence + (1 - share) * (1 - acceptance))


def test_lk_losses_of_equal_and_of_disjoint_distributions():
    logits, other = torch.tensor([[9.0, 0.0, -9.0]]), torch.tensor([[-200.0, 0.0, 200.0]])
    for name in ("lk-alpha", "lk-lambda"):
        assert hass.LOSSES[name](logits, logits, 2).item() == pytest.approx(0.0, abs=1e-5)
        draft = other.clone().requires_grad_()
        loss = hass.LOSSES[name](draft, -other, 2)
        loss.sum().backward()
        assert loss.isfinite().all() and draft.grad.isfinite().all()


def test_lk_alpha_is_the_cross_entropy_where_the_target_is_certain():
    certain = torch.tensor([[0.0, 200.0, 0.0, 0.0]])
    assert hass.lk_alpha(P.log(), certain, 2).item() == pytest.approx(-math.log(0.2))


@pytest.mark.parametrize("name", list(hass.LOSSES))
def test_chunked_sum_with_the_cross_entropy_equals_autograd(monkeypatch, name):
    monkeypatch.setattr(losses, "AUTOGRAD_CHUNK", 4)
    torch.manual_seed(0)
    target, head, weights = torch.randn(10, 16), torch.randn(30, 16), torch.rand(10)
    ours = torch.randn(10, 16, requires_grad=True)
    plain = ours.detach().clone().requires_grad_()
    loss = losses.distillation_loss(ours, target, head, weights, 5, 0.7, hass.LOSSES[name])
    (2 * loss).backward()
    target_logits, draft_logits = target @ head.T, plain @ head.T
    rows = -(target_logits.softmax(-1) * draft_logits.log_softmax(-1)).sum(-1)
    expected = ((rows + 0.7 * hass.LOSSES[name](draft_logits, target_logits, 5)) * weights).sum()
    (2 * expected).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours.grad, plain.grad, atol=1e-5, rtol=1e-4)


def test_the_fused_topk_equals_the_one_in_the_table():
    torch.manual_seed(0)
    target, head, weights = torch.randn(10, 16), torch.randn(30, 16), torch.rand(10)
    results = []
    for harmonised in (None, hass.topk):
        predicted = torch.randn(10, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        loss = losses.distillation_loss(predicted, target, head, weights, 5, 0.7, harmonised)
        loss.backward()
        results.append((loss, predicted.grad))
    for fused, listed in zip(*results, strict=True):
        torch.testing.assert_close(fused, listed)
