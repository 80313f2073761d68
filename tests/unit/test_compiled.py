"""Compiled loops: what loading the compiler does to the process."""

import sys

import numpy as np

from vllm_specplug.compiled import compiled


@compiled
def total(values):
    found = 0.0
    for value in values:
        found += value
    return found


def test_what_modules_hold_can_be_looked_into():
    """As vLLM does when a CPU engine starts: each ``__dict__`` is a mapping, llvmlite's library's included."""
    assert total(np.arange(4.0)) == 6.0
    library = sys.modules["llvmlite.binding.ffi"].lib
    for _ in range(2):
        assert vars(library).get("kernel") is None
    assert library.LLVMPY_GetVersionInfo() > 0
