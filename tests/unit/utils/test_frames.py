"""Memory for Python's frames at any depth of the stack."""

import resource
import sys

import pytest

from vllm_specplug.utils.frames import with_room


@with_room
def _call(function, *args):
    return function(*args)


def test_a_function_stays_what_it_is():
    assert _call(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        _call(divmod, 1, 0)


def _leaf() -> None:
    pass


def _loop_at(depth: int) -> int:
    """Return the page faults of a loop of calls, ``depth`` frames further down."""
    if depth:
        return _loop_at(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(200):
        _leaf()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(sys.implementation.name != "cpython" or sys.version_info < (3, 11), reason="frames are elsewhere")
def test_no_depth_maps_memory_at_every_call():
    depths = range(400)  # three chunks
    assert any(_loop_at(depth) >= 200 for depth in depths)  # without ``with_room`` it happens
    assert not any(_call(_loop_at, depth) >= 200 for depth in depths)
