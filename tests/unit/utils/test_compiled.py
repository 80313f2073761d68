"""Compiled loops: their effect on loaded modules, and compilation without a writable cache folder."""

import sys

import numba
import numpy as np
import pytest

from vllm_specplug.utils import compiled as module
from vllm_specplug.utils.compiled import compiled


@compiled
def total(values):
    found = 0.0
    for value in values:
        found += value
    return found


def test_objects_of_loaded_modules_have_a_dict():
    """vLLM reads each ``__dict__`` when a CPU engine starts; that of llvmlite's library must be a mapping too."""
    assert total(np.arange(4.0)) == 6.0
    library = sys.modules["llvmlite.binding.ffi"].lib
    for _ in range(2):
        assert vars(library).get("kernel") is None
    assert library.LLVMPY_GetVersionInfo() > 0


def double(count):
    return 2 * count


@pytest.mark.parametrize("writable", [True, False])
def test_it_compiles_without_a_cache_folder(monkeypatch, writable):
    tried = []

    def njit(function=None, cache=False):
        tried.append(cache)
        if cache and not writable:
            raise RuntimeError("cannot cache function 'double': no locator available for file")
        return numba.njit(function, cache=cache) if function else numba.njit(cache=cache)

    monkeypatch.setattr(module, "_load_njit", lambda: njit)
    fast = compiled(double)
    assert fast(3) == 6 and fast is not double
    assert tried == ([True] if writable else [True, False])
