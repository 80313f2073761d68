"""Room for Python's frames, so that a hot loop does not map and unmap their memory at every call.

CPython (3.11 and later) keeps frames in chunks of 16 KiB, each mapped from the system when a call no longer fits and
unmapped when that call returns.  A loop that happens to run where a chunk is full maps one for every call it makes.
In vLLM's worker process that place is inside the model's layers: some 190 page faults in each step of a tree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

#: In slots of 8 bytes, just above a power of two.  Chunks are powers of two, so what is left of one is about as large.
_STACK = 2**15 + 1


def with_room(call: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """``call(*args, **kwargs)``, with 256 KiB for the frames of everything that it calls."""
    return call(*args, **kwargs)


# A frame that may need a stack as large brings a chunk of 512 KiB; pages that no frame uses are never touched.
with_room.__code__ = with_room.__code__.replace(co_stacksize=_STACK)
