"""Where the proof's text lies: positions of its steps, and blocks of the KV cache that no request owns yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: Tokens that are read in front of the trees, and tokens around each other place that is read.
LAST_READ, ALSO_READ = 16, 8


@dataclass(frozen=True)
class Places:
    """Positions of the text.

    Attributes:
        root: position of the first tree's root; the tokens before it are the context.
        boundary: first position of a new page, after the root; 0: the text is too short to reach one.
        reads: half-open ranges of the context that are computed.  The rest of it is never read by the model: its
            pages are those of the first range again, which costs nothing however long the context is.
    """

    root: int
    boundary: int
    reads: list[tuple[int, int]]


def choose_places(
    page: int, windows: Sequence[int], branch_depth: int, room: int, max_len: int, read_all: bool = False
) -> Places | None:
    """Choose a context after which a tree crosses the end of a page and the reach of sliding windows.

    Args:
        page: tokens of a page; the largest of the KV cache groups.
        windows: sliding windows of the layers, in tokens; windows that do not fit are left out.
        branch_depth: depth at which the path comes to the next page.
        room: positions after the root that are needed.
        max_len: positions that a request has.
        read_all: whether the whole context is read: the target has recurrent states.

    Returns:
        None if a request is too short for a proof.
    """
    if max_len < room + 2:
        return None
    fitting = [window for window in windows if window + room + page < max_len]
    least = max([LAST_READ, *(window + 1 for window in fitting)])
    boundary = -(-(least + branch_depth) // page) * page
    root = boundary - branch_depth
    if root + room > max_len:
        root, boundary = min(LAST_READ, max_len - room), 0
    if read_all:
        return Places(root, boundary, [(0, root)])
    wanted = [(0, ALSO_READ), (root - LAST_READ, root)]
    wanted += [(root - window - ALSO_READ // 2, root - window + ALSO_READ) for window in fitting]
    return Places(root, boundary, _merged(wanted, root))


def _merged(ranges: list[tuple[int, int]], stop: int) -> list[tuple[int, int]]:
    """Return ranges within ``[0, stop)``, joined where less than a range lies between them."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted((max(first, 0), min(last, stop)) for first, last in ranges):
        if merged and first <= merged[-1][1] + ALSO_READ:
            merged[-1] = merged[-1][0], max(merged[-1][1], last)
        else:
            merged.append((first, last))
    return merged


class Pages:
    """Hands out blocks by KV cache group.

    Args:
        kv_cache_config: vLLM's.
        places: of the text.

    Raises:
        ValueError: there are too few blocks.
    """

    def __init__(self, kv_cache_config: Any, places: Places):
        self._sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
        self._left = iter(range(1, kv_cache_config.num_blocks))
        self._context = [self._shared(size, places) for size in self._sizes]
        self._places = places

    def _take(self) -> int:
        try:
            return next(self._left)
        except StopIteration:
            raise ValueError("the KV cache has too few blocks") from None

    def _shared(self, size: int, places: Places) -> list[int]:
        """Return the blocks before the boundary; blocks that are never read are the first one again."""
        blocks: list[int] = []
        for first in range(0, places.boundary - size + 1, size):
            read = any(start < first + size and stop > first for start, stop in places.reads)
            # The page before the boundary holds the first rows of the tree.
            near = first + size > places.root
            blocks.append(self._take() if read or near or not blocks else blocks[0])
        return blocks

    def table(self, num_tokens: int) -> tuple[list[int], ...]:
        """Return blocks for a request of so many tokens: those of the context, and after it blocks of its own."""
        return tuple(
            context + [self._take() for _ in range(-(-num_tokens // size) - len(context))]
            for context, size in zip(self._context, self._sizes, strict=True)
        )

    def own(self, num_tokens: int) -> tuple[list[int], ...]:
        """Return blocks for a request that shares nothing."""
        return tuple([self._take() for _ in range(-(-num_tokens // size))] for size in self._sizes)
