"""Numbers have the same bits at any place of a tensor."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from vllm_specplug.cpu.place_free import PlaceFree

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FUNCTIONS = [torch.sigmoid, torch.Tensor.sigmoid, functional.sigmoid, functional.silu, torch.nn.SiLU()]
X = torch.cat([8 * torch.randn(8000, generator=torch.Generator().manual_seed(0)), torch.tensor([1e4, -1e4, 0.0, 90.0])])


def in_parts(function, x):
    return torch.cat([function(part) for part in x.split(4)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_bit_depends_on_the_place(function, dtype):
    x = X.to(dtype)
    expected = function(x)
    with PlaceFree():
        whole = function(x)
        assert torch.equal(in_parts(function, x), whole)
    assert torch.allclose(whole, expected)
    assert whole.dtype == dtype


def test_the_rest_is_torchs():
    expected = functional.silu(X.clone(), inplace=True), X.tanh()
    with PlaceFree():
        assert torch.equal(functional.silu(X.clone(), inplace=True), expected[0])
        assert torch.equal(X.tanh(), expected[1])


def test_torchs_bits_do():
    """The control: what the module is for."""
    assert not torch.equal(in_parts(torch.sigmoid, X), torch.sigmoid(X))
