"""The shapes of a round on the V2 runner: how many nodes are drafted and verified for each request, and how deep.

On a GPU a round runs recorded graphs, so it has one of a few shapes, the same for the whole batch.  Each shape is an
arm of the planner; ``PLAIN`` is the round without drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_specplug.budget.arms import PLAIN, Arm

#: Nodes of the shapes: with the root, rows that fill blocks of the attention kernel.
LADDER = (7, 15, 31, 63)
#: A shape this much smaller than the configured one is worth graphs of its own.  Chosen by hand.
SMALLER_BY = 1.5


@dataclass(frozen=True)
class Shape(Arm):
    """A round with drafts.

    Attributes:
        nodes: drafted and verified for each request.
        depth: levels of its tree.
    """

    nodes: int = 0
    depth: int = 0


def shapes_of(num_nodes: int, draft_depth: int = 32, draft_top_k: int | None = None) -> list[Shape]:
    """Return the shapes with drafts, smallest first; the last one is the configured tree.

    Args:
        num_nodes: nodes of the configured tree.
        draft_depth: its levels.
        draft_top_k: children per node of a drafter that drafts level by level; None: levels cost nothing, so that each
            shape has all of them.
    """
    nodes = [count for count in LADDER if count * SMALLER_BY <= num_nodes] + [num_nodes]
    return [
        Shape(f"{count} nodes", True, False, count, _depth(count, num_nodes, draft_depth, draft_top_k))
        for count in nodes
    ]


def _depth(nodes: int, num_nodes: int, draft_depth: int, draft_top_k: int | None) -> int:
    """Choose the levels of a tree: one more than a binary tree of so many nodes has, enough to hold them."""
    if draft_top_k is None or nodes == num_nodes:
        return draft_depth
    needed = 1 + max(0, -(-(nodes - draft_top_k) // draft_top_k**2))
    return min(draft_depth, max((nodes + 1).bit_length(), needed))


def nodes_of(arm: Arm) -> int:
    """Return the nodes of a shape, 0 for ``PLAIN``."""
    return 0 if arm == PLAIN else arm.nodes
