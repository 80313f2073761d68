"""Memory for weights that the operators read from end to end, in huge pages where Linux has them.

With pages of 4 KiB, a CPU spends a part of the time on finding where the next page is.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from threading import Lock

import torch

HUGE_PAGE = 2 << 20
#: Bytes that small tensors share.  They are given back when the last of these tensors is gone.
_CHUNK = 16 * HUGE_PAGE
#: Where a tensor may begin, in bytes: a cache line.
_ALIGNMENT = 64

_lock = Lock()
_rest = torch.empty(0, dtype=torch.uint8)


def empty_in_huge_pages(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous tensor on the CPU, as ``torch.empty``; memory that is not written to takes no room."""
    global _rest
    size = shape.numel() * dtype.itemsize
    taken = -(-size // _ALIGNMENT) * _ALIGNMENT
    with _lock:
        if taken >= _CHUNK:
            memory = _map(taken)
        else:
            if taken > len(_rest):
                _rest = _map(_CHUNK)
            memory, _rest = _rest[:taken], _rest[taken:]
    return memory[:size].view(dtype).view(shape)


def _map(size: int) -> torch.Tensor:
    """Return ``size`` bytes or more, from the start of a page on."""
    size = -(-size // HUGE_PAGE) * HUGE_PAGE
    mapped = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # another system than Linux, or a kernel without huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE
    return memory[start : start + size]
