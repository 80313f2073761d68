"""The interpreter's checks can fail: kernels that leave their tensors, or rely on the order of programs, are found.

Masked lanes are not.
"""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.doubles.bounds import Outside

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter has bounds, a GPU has none")


@triton.jit
def _copy(from_ptr, to_ptr, count, shift, IS_MASKED: tl.constexpr):
    column = tl.arange(0, 8)
    mask = column + shift < count if IS_MASKED else column < 8
    values = tl.load(from_ptr + shift + column, mask=mask, other=0)
    tl.store(to_ptr + column, values, mask=column < count)


@triton.jit
def _add(to_ptr, place):
    tl.atomic_add(to_ptr + place, 1)


@triton.jit
def _follow(addresses_ptr, to_ptr, shift):
    source = tl.load(addresses_ptr).to(tl.pointer_type(tl.float32))
    tl.store(to_ptr, tl.load(source + shift))


def outside(launch):
    """Whether a launch leaves its tensors."""
    try:
        launch()
    except InterpreterError as error:
        assert "Outside" in str(error) and Outside.found
        Outside.found.clear()
        return True
    assert not Outside.found
    return False


def test_reads():
    storage = torch.arange(32.0)
    source, neighbour = storage[8:16], storage[16:24]
    assert not outside(lambda: _copy[1,](source, neighbour, 8, 0, False))
    assert outside(lambda: _copy[1,](source, neighbour, 8, 1, False))  # into its neighbour, of the same storage
    assert outside(lambda: _copy[1,](source, neighbour, 8, -1, False))
    assert not outside(lambda: _copy[1,](source, neighbour, 8, 1, True))


def test_writes():
    source = torch.zeros(8)
    assert not outside(lambda: _copy[1,](source, torch.zeros(10)[:5], 5, 0, False))
    assert outside(lambda: _copy[1,](source, torch.zeros(10)[:5], 6, 0, False))
    assert outside(lambda: _copy[1,](source, torch.zeros(0), 1, 0, False))
    counts = torch.zeros(3, dtype=torch.int32)
    assert [outside(lambda place=place: _add[1,](counts, place)) for place in (0, 2, 3)] == [False, False, True]


def test_views():
    """The elements of a view with strides reach to its last one."""
    column = torch.zeros(8, 4)[:, 1]
    assert not outside(lambda: _copy[1,](torch.zeros(29), column, 8, 21, False))
    assert outside(lambda: _copy[1,](column, torch.zeros(8), 8, 22, False))


def test_addresses_of_a_table():
    values, to = torch.zeros(4), torch.zeros(1)
    addresses = torch.tensor([values.data_ptr()], dtype=torch.uint64)
    assert not outside(lambda: _follow[1,](addresses, to, 3))
    assert outside(lambda: _follow[1,](addresses, to, 1 << 40))


def test_new_memory_is_poisoned():
    assert torch.empty(3).isnan().all() and torch.zeros(3).new_empty(2).isnan().all()
    assert (torch.empty(3, dtype=torch.int32) == 2**31 - 1).all() and torch.empty(3, dtype=torch.bool).all()


@triton.jit
def _count_on(values_ptr):
    program = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
    tl.store(values_ptr + program + 1, tl.load(values_ptr + program) + 1)


@triton.jit
def _number(values_ptr):
    program = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
    tl.atomic_add(values_ptr + program, program + 1)


@pytest.mark.parametrize("grid", [(24,), (2, 3, 4)])
def test_programs_run_in_any_order(grid):
    """Each runs once; what reads the result of another one of its launch is wrong."""
    values, numbers = torch.zeros(25, dtype=torch.int32), torch.zeros(24, dtype=torch.int32)
    _count_on[grid](values)
    _number[grid](numbers)
    assert not torch.equal(values, torch.arange(25).int())
    assert torch.equal(numbers, torch.arange(24).int() + 1)
