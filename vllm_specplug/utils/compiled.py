"""Loops over small arrays on the CPU, compiled by numba (which comes with vLLM).

A draft phase with a few nodes is too small for array libraries: each of their calls takes longer than its work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class compiled:
    """A function that numba compiles at its first call, or for another such function that calls it.

    Numba is loaded then, too: it takes some 25 MiB, and a server's front end and its scheduler run none of the loops.
    The result is cached on disk if a cache folder is writable.  The cache is invalidated only when the function's own
    file changes.  Values that may change in other files must be arguments.
    """

    def __init__(self, function: Callable[..., Any]):
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._dispatcher(*args)

    @property
    def signatures(self) -> list[Any]:
        """The types of arguments that it is compiled for."""
        return self._dispatcher.signatures

    @property
    def _numba_type_(self) -> Any:  # by which numba knows a function that it compiles
        return self._dispatcher._numba_type_

    @functools.cached_property
    def _dispatcher(self) -> Any:
        njit = _load_njit()
        try:
            return njit(cache=True)(self._function)
        except RuntimeError:  # no writable cache folder, neither beside the source nor in the user's cache
            return njit(self._function)


def _load_njit() -> Callable[..., Any]:
    from llvmlite.binding import ffi
    from numba import njit

    # When a CPU engine starts, vLLM's ``triton_utils.dispatcher`` reads the ``__dict__`` of every object in every
    # loaded module.  llvmlite's library object treats any attribute name, ``__dict__`` included, as one of its
    # functions and raises.  With an empty entry the engine starts.
    getattr(ffi.lib, "_fntab", {}).setdefault("__dict__", {})
    return njit
