"""Loops over small arrays on the host, compiled by numba (which comes with vLLM).

A round of a few nodes is too small for array libraries: each of their calls takes longer than its work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from llvmlite.binding import ffi
from numba import njit

Function = TypeVar("Function", bound=Callable)

# A CPU engine that starts looks into the ``__dict__`` of whatever any loaded module holds (vLLM's
# ``triton_utils.dispatcher``).  llvmlite's library takes every name for a function of its own, that one included, and
# the engine would not start: it is given an empty one.
getattr(ffi.lib, "_fntab", {}).setdefault("__dict__", {})


def compiled(function: Function) -> Function:
    """Compile at the first call; what was compiled is kept on disk, where a place can be written to.

    What is kept is taken for out of date when the function's own file has changed, and then only: what may change in
    other files is handed in as an argument.
    """
    try:
        return njit(cache=True)(function)
    except RuntimeError:  # neither beside the source nor in the user's cache
        return njit(function)
