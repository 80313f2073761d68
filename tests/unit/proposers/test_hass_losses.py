"""The harmonised losses and the LK losses: cases computed by hand, and the chunked loss with its gradient."""

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


def test_names():
    of_hass = ["topk", "topp", "topk-linear", "topk-softmax", "bidirectional", "recall", "bild"]
    assert list(hass.LOSSES) == [*of_hass, "lk-alpha", "lk-lambda"]


def test_topk():
    assert value("topk") == pytest.approx(-(0.5 * math.log(0.1) + 0.3 * math.log(0.2)))


def test_topp_takes_the_smallest_set_beyond_p():
    # 0.5 + 0.3 = 0.8 is not beyond 0.9; with 0.15 it is
    expected = -(0.5 * math.log(0.1) + 0.3 * math.log(0.2) + 0.15 * math.log(0.3))
    assert value("topp") == pytest.approx(expected)


def test_topk_linear_divides_by_the_sums():
    expected = -(0.5 / 0.8 * math.log(0.1 / 0.3) + 0.3 / 0.8 * math.log(0.2 / 0.3))
    assert value("topk-linear") == pytest.approx(expected)


def test_topk_softmax_of_the_probabilities():
    q, p = [math.exp(0.5), math.exp(0.3)], [math.exp(0.1), math.exp(0.2)]
    expected = -sum(a / sum(q) * math.log(b / sum(p)) for a, b in zip(q, p, strict=True))
    assert value("topk-softmax") == pytest.approx(expected)


def test_bidirectional_counts_an_id_of_both_sets_once():
    assert value("bidirectional") == pytest.approx(-(Q * P.log()).sum().item())  # both halves: all four ids
    one = hass.bidirectional(Q.log(), Q.log(), 2).item()
    assert one == pytest.approx(hass.topk(Q.log(), Q.log(), 2).item())


def test_recall():
    def sigmoid(x):
        return 1 / (1 + math.exp(-x))

    def rank(i):
        rivals = [j for j in range(4) if j != i]
        leads = [math.log(P[0, j].item() / P[0, i].item()) / hass.RANK_TEMPERATURE for j in rivals]
        return 1 + sum(map(sigmoid, leads))

    expected = 1 - (sigmoid(2 - rank(0)) + sigmoid(2 - rank(1))) / 2
    assert value("recall") == pytest.approx(expected, rel=1e-5)


def test_recall_is_low_for_the_same_ranking_and_high_for_the_opposite():
    logits = torch.arange(20.0)[None] * 4
    same, opposite = (hass.recall(draft, logits, 5).item() for draft in (logits, logits.flip(-1)))
    # ids ranked 1..5 are recalled by sigmoid(4), ..., sigmoid(0)
    assert same == pytest.approx(1 - torch.arange(5.0).sigmoid().mean().item(), abs=1e-3)
    assert opposite > 0.999


def test_bild():
    # With k = 2 each set has one pair, so both softmaxes are 1 and the divergence is 0.
    assert value("bild") == pytest.approx(0.0)

    def divergence(ids):
        pairs = [(a, b) for i, a in enumerate(ids) for b in ids[i + 1 :]]
        t, d = (
            [math.exp(math.log(x[0, a].item() / x[0, b].item()) / hass.BILD_TEMPERATURE) for a, b in pairs]
            for x in (Q, P)
        )
        t, d = [v / sum(t) for v in t], [v / sum(d) for v in d]
        return sum(a * math.log(a / b) for a, b in zip(t, d, strict=True))

    assert value("bild", 3) == pytest.approx(divergence([0, 1, 2]) + divergence([3, 2, 1]), rel=1e-4)


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


def test_a_drafters_own_lm_head_gets_its_gradient(monkeypatch):
    monkeypatch.setattr(losses, "CHUNK", 4)
    torch.manual_seed(0)
    target, target_head, weights = torch.randn(10, 16), torch.randn(30, 16), torch.rand(10)
    grads = []
    for chunked in (True, False):
        generator = torch.Generator().manual_seed(1)
        predicted, own = (torch.randn(n, 16, generator=generator).requires_grad_() for n in (10, 30))
        if chunked:
            loss = losses.distillation_loss(predicted, target, own, weights, target_head=target_head)
        else:
            rows = (target @ target_head.T).softmax(-1) * (predicted @ own.T).log_softmax(-1)
            loss = -(rows.sum(-1) * weights).sum()
        (3 * loss).backward()
        grads.append((loss, predicted.grad, own.grad))
    for ours, expected in zip(*grads, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)
