"""A large chunk for Python's frames, so that a hot loop does not map and unmap memory at every call.

CPython (3.11 and later) keeps frames in chunks of 16 KiB.  It maps a new chunk when a call no longer fits and unmaps it
when that call returns.  A loop that runs where a chunk is full maps one for each of its calls.  In vLLM's worker
process this happens inside the model's layers and causes some 190 page faults in each step of a tree.
"""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

F = TypeVar("F", bound=FunctionType)

#: In slots of 8 bytes, just above a power of two.  Chunk sizes are powers of two, so the rest of the chunk is as large.
_STACK = 2**15 + 1


def with_room(function: F) -> F:
    """Decorate a function: everything that it calls has 256 KiB for its frames.

    Its own frame, of such a stack size, gets a chunk of 512 KiB.  Pages that no frame uses are never touched.
    """
    function.__code__ = function.__code__.replace(co_stacksize=_STACK)
    return function
