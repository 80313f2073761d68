"""Loops over small arrays on the host, compiled by numba (which comes with vLLM).

A round of a few nodes is too small for array libraries: each of their calls takes longer than its work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from numba import njit

Function = TypeVar("Function", bound=Callable)


def compiled(function: Function) -> Function:
    """Compile at the first call; what was compiled is kept on disk, where a place can be written to."""
    try:
        return njit(cache=True)(function)
    except RuntimeError:  # neither beside the source nor in the user's cache
        return njit(function)
