"""The shapes of a round on a GPU: how many nodes are drafted and verified for each request, and how deep.

On a GPU a round runs recorded graphs, so it has one of a few shapes, the same for the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Nodes of the shapes: with the root, rows that fill blocks of the attention kernel.
LADDER = (1, 3, 7, 15, 31, 63)
#: A smaller shape is left out if the configured tree has less than 1.5 times its nodes: it would save little time.
SMALLER_BY = 1.5


@dataclass(frozen=True)
class Shape:
    """A round with drafts.

    Attributes:
        nodes: drafted and verified for each request.
        depth: levels of its tree.
    """

    nodes: int
    depth: int


def shapes_of(num_nodes: int, draft_depth: int = 32, draft_top_k: int | None = None) -> list[Shape]:
    """Return the shapes with drafts, smallest first; the last one is the configured tree.

    Args:
        num_nodes: nodes of the configured tree.
        draft_depth: its levels.
        draft_top_k: children per node of a drafter that drafts level by level; None: levels cost nothing, so that each
            shape has all of them.
    """
    nodes = [count for count in LADDER if count * SMALLER_BY <= num_nodes] + [num_nodes]
    return [Shape(count, min(count, _depth(count, num_nodes, draft_depth, draft_top_k))) for count in nodes]


def _depth(nodes: int, num_nodes: int, draft_depth: int, draft_top_k: int | None) -> int:
    """Choose the levels of a tree: one more than a binary tree of so many nodes has, enough to hold them."""
    if draft_top_k is None or nodes == num_nodes:
        return draft_depth
    needed = 1 + max(0, -(-(nodes - draft_top_k) // draft_top_k**2))
    return min(draft_depth, max((nodes + 1).bit_length(), needed))
