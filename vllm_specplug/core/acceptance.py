"""Accepted tokens of a drafter's trees, by blocks of trees, and whether its new version does worse than the old one.

Trees of one text are alike, so that the unit of the comparison is a block: up to ``BLOCK_TREES`` verified trees of one
request in a row, or all trees of a shorter one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable
from typing import NamedTuple

#: Verified trees of a block.  Chosen by hand; not swept.
BLOCK_TREES = 32
#: Blocks that are kept of the version in use.  Chosen by hand.
KEPT_BLOCKS = 256
#: Fewest blocks before the change with which a new version is compared.  Chosen by hand.
LEAST_BLOCKS = 8
#: Numbers of blocks at which a new version is looked at; after the last one it stays.  Each look takes it back with a
#: probability of 1% if it is as good as the version before: ``NORMAL_QUANTILE`` standard errors.
LOOKS = (8, 16, 32, 64)
NORMAL_QUANTILE = 2.33


class Block(NamedTuple):
    """Verified trees of one request."""

    accepted: int
    trees: int


class Acceptance:
    """Counts the accepted nodes of verified trees.

    Attributes:
        blocks: the newest complete blocks.
        num_blocks: blocks that were completed.
    """

    def __init__(self) -> None:
        self.blocks: deque[Block] = deque(maxlen=KEPT_BLOCKS)
        self.num_blocks = 0
        self._open: dict[str, Block] = {}

    def add(self, request_id: str, accepted: int) -> None:
        """Add a verified tree."""
        known = self._open.pop(request_id, Block(0, 0))
        block = Block(known.accepted + accepted, known.trees + 1)
        if block.trees < BLOCK_TREES:
            self._open[request_id] = block
        else:
            self._close(block)

    def finish(self, request_ids: Iterable[str]) -> None:
        """Complete the blocks of requests that have ended."""
        for request_id in request_ids:
            if (block := self._open.pop(request_id, None)) is not None:
                self._close(block)

    def _close(self, block: Block) -> None:
        self.blocks.append(block)
        self.num_blocks += 1


def mean_of(blocks: Collection[Block]) -> tuple[float, float]:
    """Return accepted nodes per tree, and the variance of this mean (of a ratio, by blocks)."""
    trees = sum(block.trees for block in blocks)
    mean = sum(block.accepted for block in blocks) / trees
    spread = sum((block.accepted - mean * block.trees) ** 2 for block in blocks)
    return mean, spread / trees**2 * len(blocks) / max(len(blocks) - 1, 1)


class Comparison:
    """Compares a new version with the one before, over requests that began after the change.

    Args:
        before: blocks of the version before.
    """

    def __init__(self, before: Iterable[Block]):
        self._before = tuple(before)
        self._looks = list(LOOKS) if len(self._before) >= LEAST_BLOCKS else []
        self.after = Acceptance()

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left to compare."""
        return not self._looks

    def is_worse(self) -> bool:
        """Return whether the new version accepts less than the one before by more than chance; asked at each step."""
        if not self._looks or self.after.num_blocks < self._looks[0]:
            return False
        self._looks.pop(0)
        (before, variance_before), (after, variance_after) = mean_of(self._before), mean_of(self.after.blocks)
        return before - after > NORMAL_QUANTILE * math.sqrt(variance_before + variance_after)

    def means(self) -> tuple[float, float]:
        """Return accepted nodes per tree before and after."""
        return mean_of(self._before)[0], mean_of(self.after.blocks)[0]
