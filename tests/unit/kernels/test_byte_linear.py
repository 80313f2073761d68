"""Linear layers in 8 bits, against the same rounding in torch."""

import pytest
import torch
from torch.nn import functional as F

from vllm_specplug.cpu.kernels.byte_linear import ByteLinear, can_multiply_bytes

pytestmark = pytest.mark.skipif(not can_multiply_bytes(), reason="this CPU does not multiply 8-bit numbers")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROTATED = 64


def numbers(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rounded(x, parts):
    """Rows whose parts are padded, rotated and rounded to the nearest of 255 steps, in float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(6):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    x = x.double().unflatten(1, (parts, -1))
    x = F.pad(x, (0, -x.shape[2] % ROTATED)).unflatten(2, (-1, ROTATED)) @ matrix / 8
    x = x.flatten(2)
    step = x.abs().amax(dim=2, keepdim=True) / 127
    return (torch.where(step > 0, x / step, 0).round() * step).flatten(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("outputs", "inputs", "parts"), [(1, 1, 1), (33, 64, 1), (100, 601, 1), (64, 384, 2), (5, 60, 3)]
)
def test_products_are_those_of_rounded_numbers(dtype, outputs, inputs, parts):
    weight, bias = numbers(outputs, inputs, dtype=dtype), numbers(outputs, dtype=dtype, seed=1)
    linear = ByteLinear(weight, parts)
    for rows in (0, 1, 2, 3, 4, 7, 10, 11, 23, 64):
        x = numbers(rows, inputs, dtype=dtype, seed=rows)
        expected = rounded(x, parts) @ rounded(weight, parts).T
        for added in (None, bias):
            found = linear(x, added)
            assert found.dtype == dtype and found.shape == (rows, outputs)
            wanted = expected if added is None else expected + added.double()
            # Numbers between two steps may be rounded to either, in both factors.
            error = 0.02 * inputs**0.5 + torch.finfo(dtype).eps * wanted.abs()
            assert ((found.double() - wanted).abs() <= error).all()


def test_rotation_keeps_rounding_fine_beside_a_large_input():
    """Its error is a quarter of that of numbers that are rounded as they are."""
    weight, x = numbers(256, 576), numbers(9, 576, seed=1)
    x[:, 7] *= 30
    exact = x @ weight.T
    step, weight_step = (one.abs().amax(dim=1, keepdim=True) / 127 for one in (x, weight))
    plain = (x / step).round() * step @ ((weight / weight_step).round() * weight_step).T
    assert (ByteLinear(weight.float())(x.float()) - exact).norm() < 0.3 * (plain - exact).norm()


def test_a_small_part_is_as_exact_as_a_large_one():
    weight, x = numbers(96, 256), numbers(5, 256, seed=1)
    x[:, :128] *= 1e-4
    weight[:, :128] *= 1e4
    exact = x @ weight.T
    one, two = ((ByteLinear(weight.float(), parts)(x.float()) - exact).norm() / exact.norm() for parts in (1, 2))
    assert two < 0.015 < 0.3 < one


def test_a_row_does_not_depend_on_others():
    linear, x = ByteLinear(numbers(96, 192).float()), numbers(40, 192, seed=1).float()
    x[3] *= 1000
    x[4] = 0
    whole = linear(x)
    assert all(torch.equal(whole[row : row + 1], linear(x[row : row + 1])) for row in range(len(x)))
    assert not whole[4].any()


def test_inputs_need_not_be_contiguous():
    linear, x = ByteLinear(numbers(96, 192).float()), numbers(7, 400, seed=1).float()
    assert torch.equal(linear(x[:, 100:292]), linear(x[:, 100:292].clone()))


@pytest.mark.parametrize("shape", [(4, 64), (192,)])
def test_other_inputs_are_refused(shape):
    with pytest.raises(RuntimeError, match="x must be"):
        ByteLinear(numbers(96, 192).float())(torch.zeros(shape))
