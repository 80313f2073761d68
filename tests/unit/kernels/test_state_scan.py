"""Convolutions and recurrences: the operators against their references; bits do not depend on cuts and batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_specplug.cpu.kernels import state_scan
from vllm_specplug.cpu.kernels.cpu_ops import operators
from vllm_specplug.cpu.kernels.state_scan import Sequences

pytestmark = pytest.mark.skipif(operators() is None, reason="needs the C++ operators")
LENGTHS, DTYPES = (1, 7, 30, 2), (torch.float32, torch.bfloat16, torch.float16)
ROWS = sum(LENGTHS)


def sequences(lengths: tuple[int, ...] = LENGTHS) -> Sequences:
    """The third begins anew; the last writes to another place than it reads."""
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return Sequences(starts, torch.tensor([1, 3, -1, 2]), torch.tensor([1, 3, 4, 0]))


def convolution(generator: torch.Generator, channels: int, taps: int) -> tuple[list[Any], torch.Tensor]:
    rows = torch.randn(ROWS, channels, generator=generator)
    weights = torch.randn(taps, channels, generator=generator), torch.randn(channels, generator=generator)
    states = torch.randn(5, channels, taps - 1, generator=generator).transpose(1, 2)
    return [[rows], [*weights]], states


def delta(generator: torch.Generator, heads: int, key_size: int, value_size: int) -> tuple[list[Any], torch.Tensor]:
    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    keys = [random(ROWS, heads // 2, key_size) for _ in range(2)]
    rows = [*keys, random(ROWS, heads, value_size), random(ROWS, heads), random(ROWS, heads)]
    return [rows, [random(heads), random(heads)]], random(5, heads, key_size, value_size)


def mamba(generator: torch.Generator, heads: int, size: int, state_size: int) -> tuple[list[Any], torch.Tensor]:
    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    between = [random(ROWS, heads // 2, state_size) for _ in range(2)]
    rows = [random(ROWS, heads, size), random(ROWS, heads), *between]
    return [rows, [-random(heads).exp(), random(heads), random(heads)]], random(5, heads, size, state_size)


def _convolve(function: Callable[..., Any], rows: list[Any], weights: list[Any], *rest: Any) -> Any:
    return function(*rows, *weights, *rest, True)


def _delta(function: Callable[..., Any], rows: list[Any], weights: list[Any], *rest: Any) -> Any:
    return function(*rows, *weights, *rest)


def _mamba(function: Callable[..., Any], rows: list[Any], weights: list[Any], *rest: Any) -> Any:
    x, dt, b, c = rows
    a, d, dt_bias = weights
    return function(x, dt, a, b, c, d, dt_bias, *rest)


KINDS = {
    "causal_conv": (_convolve, convolution, [(300, 4), (64, 3), (5, 2)]),
    "gated_delta": (_delta, delta, [(4, 128, 128), (2, 24, 40), (2, 16, 80)]),
    "mamba2_scan": (_mamba, mamba, [(4, 64, 128), (2, 10, 12), (2, 33, 16)]),
}
CASES = [pytest.param(name, sizes, id=f"{name} {sizes}") for name, kind in KINDS.items() for sizes in kind[2]]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


def made(name: str, sizes: tuple[int, ...], dtype: torch.dtype):
    run, inputs, _ = KINDS[name]
    (rows, weights), states = inputs(torch.Generator().manual_seed(0), *sizes)
    return run, rows, weights, states.to(dtype)


@pytest.mark.parametrize("name, sizes", CASES)
def test_operators_equal_their_references(name, sizes, dtype):
    run, rows, weights, before = made(name, sizes, dtype)
    ours, theirs = before.clone(), before.clone()
    found = run(getattr(state_scan, name), rows, weights, ours, ours, sequences())
    expected = run(getattr(state_scan, f"{name}_reference"), rows, weights, theirs, theirs, sequences())
    exact = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]
    assert torch.allclose(found, expected, rtol=exact, atol=exact)
    assert torch.allclose(ours.float(), theirs.float(), rtol=exact, atol=exact)


@pytest.mark.parametrize("name, sizes", CASES)
def test_cuts_and_batches_change_no_bit(name, sizes, dtype):
    """Rows one by one, each on the state that the one before it has left in another tensor."""
    run, rows, weights, before = made(name, sizes, dtype)
    function, after = getattr(state_scan, name), before.clone()
    together = run(function, rows, weights, before, after, sequences())
    for span, source, place in sequences():
        states, at = before, source
        for row in span:
            one = torch.zeros_like(before[:1])
            alone = Sequences.single(torch.tensor([at]), torch.tensor([0]))
            found = run(function, [x[row : row + 1] for x in rows], weights, states, one, alone)
            assert torch.equal(found[0], together[row])
            states, at = one, 0
        assert torch.equal(states[0], after[place])


def test_another_order_changes_bits():
    """The control: a sum over keys from the last to the first."""
    run, rows, weights, before = made("gated_delta", (4, 128, 128), torch.float32)
    plain = run(state_scan.gated_delta, rows, weights, before.clone(), before.clone(), sequences())
    turned = [rows[0].flip(-1).contiguous(), rows[1].flip(-1).contiguous(), *rows[2:]]
    states = before.flip(2).contiguous()
    assert not torch.equal(run(state_scan.gated_delta, turned, weights, states, states, sequences()), plain)
