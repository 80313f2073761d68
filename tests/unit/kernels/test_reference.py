"""Attention in parts, merged by log-sum-exp, against the whole."""

import math

import pytest
import torch

from tests.doubles.attention_reference import merge_attention, partial_attention, tree_attention

REQS, ROWS, HEADS, KV_HEADS, DIM = 3, 7, 4, 2, 8
SCALE = 0.4


def make_parts(context_lens, seed=0, dtype=torch.float64, width=20):
    """Queries, context and tree keys/values, and a random ancestor mask whose last row is padding."""
    g = torch.Generator().manual_seed(seed)

    def randn(rows, heads):
        return torch.randn(REQS, rows, heads, DIM, generator=g, dtype=torch.float64).to(dtype)

    mask = torch.rand(REQS, ROWS, ROWS, generator=g) < 0.4
    mask = (mask | torch.eye(ROWS, dtype=torch.bool)).tril()
    mask[:, -1] = False
    lens = torch.tensor(context_lens)
    in_context = torch.arange(width) < lens.unsqueeze(1)
    seen = in_context.unsqueeze(1) & mask.diagonal(dim1=1, dim2=2).unsqueeze(2)
    tensors = (randn(ROWS, HEADS), *(randn(n, KV_HEADS) for n in (width, width, ROWS, ROWS)))
    return tensors, mask, seen, lens


@pytest.mark.parametrize("context_lens", [[20, 1, 7], [0, 0, 0], [0, 20, 3]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_context_and_tree_merge_to_the_whole(context_lens, dtype):
    (query, context_key, context_value, key, value), mask, seen, lens = make_parts(context_lens, dtype=dtype)
    whole = tree_attention(query, context_key, context_value, key, value, mask, SCALE, lens)
    context = partial_attention(query, context_key, context_value, seen, SCALE)
    merged, _ = merge_attention(*context, *partial_attention(query, key, value, mask, SCALE))
    torch.testing.assert_close(merged.to(dtype), whole)
    assert (merged[:, -1] == 0).all()  # a padding row sees nothing in either part


def test_any_parts_in_any_order():
    """Split keys are merged pair by pair, as a kernel does that splits the context among programs."""
    (query, key, value, *_), _, seen, _ = make_parts([20, 9, 13])
    expected = partial_attention(query, key, value, seen, SCALE)
    pieces = [
        partial_attention(query, key[:, a:b], value[:, a:b], seen[:, :, a:b], SCALE) for a, b in ((0, 4), (4, 20))
    ]
    for first, second in (pieces, pieces[::-1]):
        for merged, whole in zip(merge_attention(*first, *second), expected, strict=True):
            torch.testing.assert_close(merged, whole)


def test_parts_that_show_nothing_may_hold_anything():
    shown, empty = torch.ones(2, 3), torch.full((2, 3), math.nan)
    never = torch.full((2,), -math.inf)
    output, log_sum_exp = merge_attention(shown, torch.tensor([0.5, -math.inf]), empty, never)
    assert output.tolist() == [[1.0] * 3, [0.0] * 3]
    assert log_sum_exp.tolist() == [0.5, -math.inf]


def test_scores_beyond_the_range_of_exp():
    large = torch.tensor([1000.0])
    output, log_sum_exp = merge_attention(torch.tensor([[2.0]]), large, torch.tensor([[4.0]]), large)
    assert output.item() == 3.0 and log_sum_exp.item() == pytest.approx(1000 + math.log(2))


def test_control_with_equal_shares():
    """The negative control: parts that are averaged, their sums forgotten, are not the whole."""
    (query, context_key, context_value, key, value), mask, seen, lens = make_parts([20, 1, 7])
    whole = tree_attention(query, context_key, context_value, key, value, mask, SCALE, lens)
    context, _ = partial_attention(query, context_key, context_value, seen, SCALE)
    tree, _ = partial_attention(query, key, value, mask, SCALE)
    assert not torch.allclose((context + tree) / 2, whole, rtol=0.05)
