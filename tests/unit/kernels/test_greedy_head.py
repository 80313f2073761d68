"""The LM head of greedy steps: its ``argmax`` is that of all logits, also where logits tie or are unusual."""

import pytest
import torch

from vllm_specplug.cpu.greedy_head import MOST_ROWS, make_greedy_head
from vllm_specplug.cpu.kernels.row_linear import CODED, make_row_linear

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZE, OUTPUTS, NUM_TOKENS = 192, 1024, 1000


def make_weight(dtype, *, spread=0.5, seed=0):
    """Weights whose rows have norms of different sizes; rows after those of the tokens are padding."""
    generator = torch.Generator().manual_seed(seed)
    factors = (spread * torch.randn(OUTPUTS, 1, generator=generator)).exp()
    weight = 0.05 * torch.randn(OUTPUTS, SIZE, generator=generator) * factors
    weight[NUM_TOKENS:] = 0
    return weight.to(dtype)


def make_hidden(dtype, num_rows, *, seed=1):
    """Hidden states with a few large numbers, as after a norm."""
    hidden = torch.randn(num_rows, SIZE, generator=torch.Generator().manual_seed(seed))
    hidden[:, 7] *= 12
    return hidden.to(dtype)


def make_both(weight, dtype=None):
    linear = make_row_linear(weight, dtype)
    if linear is None or (head := make_greedy_head(weight, NUM_TOKENS, linear.operands)) is None:
        pytest.skip("this CPU does not multiply 8-bit numbers, or multiplies in tiles")
    return linear, head


def check(linear, head, hidden):
    """Compare with all logits; returns how many of them were computed."""
    expected, found = linear(hidden, None, None)[:, :NUM_TOKENS], head(hidden)[:, :NUM_TOKENS]
    assert torch.equal(found.argmax(dim=1), expected.argmax(dim=1))
    computed = (found != float("-inf")) | (expected == float("-inf"))
    assert torch.equal(found[computed], expected[computed])
    return int(computed.sum())


@pytest.mark.parametrize("num_rows", [1, 2, 7, 10, 11, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax_is_that_of_all_logits_and_few_are_computed(dtype, num_rows):
    linear, head = make_both(make_weight(dtype))
    computed = [check(linear, head, make_hidden(dtype, num_rows, seed=seed)) for seed in range(30)]
    assert sum(computed) < 0.7 * 30 * num_rows * NUM_TOKENS


def test_most_rows():
    linear, head = make_both(make_weight(torch.bfloat16))
    check(linear, head, make_hidden(torch.bfloat16, MOST_ROWS))
    with pytest.raises(RuntimeError, match="at most 64 rows"):
        head(make_hidden(torch.bfloat16, MOST_ROWS + 1))


@pytest.mark.parametrize("stored", [torch.bfloat16, CODED])
def test_weights_of_fewer_bits_beside_float32(stored):
    linear, head = make_both(make_weight(torch.bfloat16).float(), torch.bfloat16)
    for seed in range(10):
        check(linear, head, make_hidden(torch.float32, 5, seed=seed))


@pytest.mark.parametrize("dtype", DTYPES)
def test_first_of_equal_logits_wins(dtype):
    weight = make_weight(dtype, spread=0.0)
    best = int((weight.float() @ make_hidden(dtype, 1)[0].float())[:NUM_TOKENS].argmax())
    for token in (3, 500, 999):
        weight[token] = weight[best]
    linear, head = make_both(weight)
    check(linear, head, make_hidden(dtype, 1))
    assert head(make_hidden(dtype, 1)).argmax() == min(3, best)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_that_are_rounded_to_the_same_number_tie(dtype):
    # All products are alike up to a few last bits: the first of those that are rounded to the largest one wins.
    base = make_weight(dtype)[:1].float()
    noise = torch.randn(OUTPUTS, SIZE, generator=torch.Generator().manual_seed(2))
    linear, head = make_both((base + 1e-5 * noise).to(dtype))
    for seed in range(20):
        check(linear, head, make_hidden(dtype, 4, seed=seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_that_differ_by_less_than_the_rounding(dtype):
    """Without the bounds of its error, the product in 8 bits would choose other blocks."""
    for seed in range(8):
        hidden = make_hidden(torch.float32, 1, seed=seed)
        along = hidden / hidden.norm()
        weight = make_weight(torch.float32, spread=0.0, seed=seed)
        small = 0.02 * torch.rand(OUTPUTS, 1, generator=torch.Generator().manual_seed(seed))
        weight += (small * weight.norm(dim=1, keepdim=True) - weight @ along.T) * along
        linear, head = make_both(weight.to(dtype))
        check(linear, head, hidden.to(dtype))


def unrotate(x):
    """Turn numbers as the operator rounds them into its inputs: 64 of them times a Hadamard matrix, its own inverse."""
    matrix = torch.ones(1, 1)
    for _ in range(6):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (x.unflatten(1, (-1, 64)) @ matrix / 8).flatten(1)


@pytest.mark.parametrize("rounded", ["weights", "inputs"])
def test_bounds_hold_where_rounding_errors_add_up(rounded):
    """All errors have one sign, so that the bounds are nearly reached: smaller ones would miss the largest logit."""
    signs = torch.randint(0, 2, (SIZE,), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    # The first number sets the size of a step.  The sum is 0.95, and -85 once the others are rounded to whole steps.
    steps = torch.full((SIZE,), -0.55)
    steps[0], steps[1:22] = 127, -1.55
    weight = torch.zeros(OUTPUTS, SIZE)
    if rounded == "weights":
        hidden = 127 * signs
        weight[3], weight[500] = steps * signs, -steps * signs
    else:
        hidden = steps * signs
        weight[3], weight[500] = 127 * signs, -127 * signs
    linear, head = make_both(unrotate(weight))
    hidden = unrotate(hidden[None])
    assert linear(hidden, None, None).argmax() == 3
    check(linear, head, hidden)


@pytest.mark.parametrize("dtype", DTYPES)
def test_negative_logits_beat_the_padding(dtype):
    weight = make_weight(dtype).abs().neg()
    linear, head = make_both(weight)
    check(linear, head, make_hidden(dtype, 3).abs())


@pytest.mark.parametrize("number", [0.0, 1e-20, float("nan"), float("inf"), 3e38])
def test_unusual_hidden_states_get_all_logits(number):
    linear, head = make_both(make_weight(torch.bfloat16))
    hidden = make_hidden(torch.bfloat16, 3)
    hidden[1] = number
    torch.testing.assert_close(head(hidden), linear(hidden, None, None), rtol=0, atol=0, equal_nan=True)


def test_logits_beyond_the_largest_float16_tie():
    linear, head = make_both(make_weight(torch.float16))
    hidden = 1e4 * make_hidden(torch.float16, 3).sign()
    assert linear(hidden, None, None).isinf().any()
    check(linear, head, hidden)


@pytest.mark.parametrize("number", [float("inf"), float("nan"), 1e9])
def test_weights_that_could_overflow_have_no_such_head(number):
    weight = make_weight(torch.bfloat16)
    linear, _ = make_both(weight)
    weight[5, 5] = number
    assert make_greedy_head(weight, NUM_TOKENS, linear.operands) is None


def test_size_that_the_rotation_does_not_divide():
    weight = make_weight(torch.bfloat16)[:, :100].contiguous()
    assert make_greedy_head(weight, NUM_TOKENS, (None, None, OUTPUTS)) is None
