"""Loops over small arrays on the CPU, compiled by numba (which comes with vLLM).

A draft phase with a few nodes is too small for array libraries: each of their calls takes longer than its work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from llvmlite.binding import ffi
from numba import njit

Function = TypeVar("Function", bound=Callable)

# When a CPU engine starts, vLLM's ``triton_utils.dispatcher`` reads the ``__dict__`` of every object in every loaded
# module.  llvmlite's library object treats any attribute name, ``__dict__`` included, as one of its functions and
# raises.  With an empty entry the engine starts.
getattr(ffi.lib, "_fntab", {}).setdefault("__dict__", {})


def compiled(function: Function) -> Function:
    """Compile the function at its first call; cache the result on disk if a cache folder is writable.

    The cache is invalidated only when the function's own file changes.  Values that may change in other files must be
    arguments.
    """
    try:
        return njit(cache=True)(function)
    except RuntimeError:  # no writable cache folder, neither beside the source nor in the user's cache
        return njit(function)
