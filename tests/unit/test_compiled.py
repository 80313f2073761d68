"""Compiling the small loops."""

import numba
import pytest

from vllm_specplug import compiled


def double(count):
    return 2 * count


@pytest.mark.parametrize("writable", [True, False])
def test_it_compiles_where_nothing_can_be_kept(monkeypatch, writable):
    tried = []

    def njit(function=None, cache=False):
        tried.append(cache)
        if cache and not writable:
            raise RuntimeError("cannot cache function 'double': no locator available for file")
        return numba.njit(function, cache=cache) if function else numba.njit(cache=cache)

    monkeypatch.setattr(compiled, "njit", njit)
    fast = compiled.compiled(double)
    assert fast(3) == 6 and fast is not double
    assert tried == ([True] if writable else [True, False])
