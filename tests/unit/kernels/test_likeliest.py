"""The operator that takes the likeliest tokens from logits, against torch."""

import sys

import pytest
import torch

from vllm_specplug.core import draft_sampling
from vllm_specplug.cpu.kernels.cpu_ops import operators
from vllm_specplug.cpu.kernels.likeliest import likeliest

INF = float("inf")
pytestmark = pytest.mark.skipif(operators() is None, reason="the C++ operators cannot be built")


def expected(logits, top_k, draft_ids, extra):
    """A stable sort of the float32 logits, so that equal ones keep their order."""
    logits = torch.cat((logits, extra), dim=1) if extra is not None else logits
    order = logits.float().sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    log_probs = torch.log_softmax(logits.double(), dim=1).gather(1, order)
    return order if draft_ids is None else draft_ids[order], log_probs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 7, 31, 64, 100, 1000, 16391])
def test_same_as_a_sort(width, dtype):
    """16-bit logits tie often; rows of a wider tensor, with further columns after them."""
    generator = torch.Generator().manual_seed(width)
    for num_rows, num_extra in ((1, 0), (5, 3), (12, 70)):
        both = (torch.randn(num_rows, width + num_extra + 2, generator=generator) * 4).to(dtype)
        logits, extra = both[:, :width], both[:, width : width + num_extra] if num_extra else None
        logits[-1, 1::2] = -INF
        ids = torch.randperm(50000, generator=generator)[: width + num_extra]
        for draft_ids in (None, ids):
            top_k = min(10, width + num_extra)
            found = likeliest(logits, top_k, draft_ids, extra)
            token_ids, log_probs = expected(logits, top_k, draft_ids, extra)
            exists = log_probs > -INF
            assert torch.equal(found.token_ids[exists], token_ids[exists])
            assert torch.allclose(found.log_probs.double()[exists], log_probs[exists], rtol=0, atol=5e-6)
            assert (found.log_probs[~exists] == -INF).all()


def test_rows_whose_log_softmax_is_nan():
    logits = torch.randn(4, 200)
    logits[0, 150], logits[1, 3] = float("nan"), INF
    logits[2] = -INF
    found = likeliest(logits, 4)
    assert found.log_probs[:3].isnan().all() and found.log_probs[3].isfinite().all()
    assert ((found.token_ids >= 0) & (found.token_ids < 200)).all()
    assert draft_sampling.likeliest(logits, 4).log_probs[:3].isnan().all()


def test_torch_where_the_operators_cannot_be_built(monkeypatch):
    logits, extra, ids = torch.randn(3, 50), torch.randn(3, 4), torch.randperm(54)
    token_ids, log_probs = expected(logits, 5, ids, extra)
    monkeypatch.setattr(sys.modules[likeliest.__module__], "operators", lambda: None)
    found = likeliest(logits, 5, ids, extra)
    assert torch.equal(found.token_ids, token_ids)
    assert torch.allclose(found.log_probs.double(), log_probs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((torch.randn(2, 5), 6), "top_k must be between 1 and 5"),
        ((torch.randn(2, 5), 2, torch.arange(4)), "draft_ids must be int64"),
        ((torch.randn(2, 5), 2, None, torch.randn(3, 1)), "the rows and the type of logits"),
    ],
)
def test_wrong_shapes_are_refused(arguments, says):
    with pytest.raises(RuntimeError, match=says):
        likeliest(*arguments)
