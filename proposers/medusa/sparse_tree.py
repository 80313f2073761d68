"""Sparse trees: which combinations of the heads' ranked predictions are drafted (Medusa, section 2.3.3 of the paper).

A node is a path of ranks: ``(0, 2)`` is "the second head's third guess behind the first head's best guess", at depth 2.
A tree is a list of paths, each parent before its children, so the first ``n`` paths are a tree for every ``n``.
Greedy growth appends the node of the largest value, so one list serves every budget.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_specplug.config import MAX_NUM_SPECULATIVE_TOKENS, ConfigError

Paths = tuple[tuple[int, ...], ...]

#: Key of a tree in a checkpoint's config and in a tree file.
TREE_KEY = "medusa_choices"

#: Ranks that the default tree and the calibration look at, per head.
MAX_RANKS = 32


def read_tree(file: str | Path) -> Paths:
    """The tree of a JSON file: a list of rank paths, or an object with one under ``medusa_choices``.

    Raises:
        ConfigError: the file cannot be read or holds no tree.
    """
    try:
        value = json.loads(Path(file).expanduser().read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"tree={str(file)!r} cannot be read ({error}): give a JSON file of rank paths, such as the one "
            "`specplug calibrate medusa` writes"
        ) from error
    if isinstance(value, dict):
        value = value.get(TREE_KEY)
    return check_paths(value, f"the tree of {file}")


def check_paths(value: object, where: str) -> Paths:
    """Validate a tree given as nested lists; ``where`` names it in messages.

    Raises:
        ConfigError: not a list of rank paths, not parent-closed, a repeated node, or too many nodes.
    """
    if not isinstance(value, list | tuple) or not value:
        raise ConfigError(f"{where} must be a non-empty list of rank paths like [[0], [1], [0, 0]], not {value!r:.80}")
    if len(value) > MAX_NUM_SPECULATIVE_TOKENS:
        raise ConfigError(f"{where} has {len(value)} nodes; at most {MAX_NUM_SPECULATIVE_TOKENS} can be verified")
    seen: set[tuple[int, ...]] = {()}
    paths = []
    for entry in value:
        if (
            not isinstance(entry, list | tuple)
            or not entry
            or any(isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 for rank in entry)
        ):
            raise ConfigError(f"{where}: {entry!r:.80} is no rank path; a path is a list of ranks from 0, like [0, 2]")
        path = tuple(entry)
        if path in seen:
            raise ConfigError(f"{where} has the node {list(path)} twice: leave one out")
        if path[:-1] not in seen:
            raise ConfigError(
                f"{where} is not parent-closed: list {list(path[:-1])}, the parent of {list(path)}, before it"
            )
        seen.add(path)
        paths.append(path)
    return tuple(paths)


def check_fits(paths: Paths, num_heads: int, draft_vocab_size: int, where: str) -> None:
    """Compare a tree with the heads that are to fill it.

    Raises:
        ConfigError: deeper than there are heads, or a rank beyond the vocabulary.
    """
    for path in paths:
        if len(path) > num_heads:
            raise ConfigError(
                f"{where} asks for {len(path)} heads (node {list(path)}), the checkpoint has {num_heads}: leave out "
                f"the nodes deeper than {num_heads}, or train more heads"
            )
        if max(path) >= draft_vocab_size:
            raise ConfigError(
                f"{where}: the rank {max(path)} of node {list(path)} is beyond the heads' vocabulary of "
                f"{draft_vocab_size}: ranks count from 0"
            )


def parents_of(paths: Paths) -> tuple[int, ...]:
    """Row of each node's parent, in the form ``tree.static_tree`` takes (row 0 is the root)."""
    rows = {(): 0} | {path: row for row, path in enumerate(paths, start=1)}
    return tuple(rows[path[:-1]] for path in paths)


def in_draw_order(paths: Paths) -> Paths:
    """The same shape with siblings ranked 0, 1, 2, ... in the order of the list, as sampled ones are drawn."""
    places: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
    counts: dict[tuple[int, ...], int] = {}
    for path in paths:
        rank = counts.get(path[:-1], 0)
        counts[path[:-1]] = rank + 1
        places[path] = (*places[path[:-1]], rank)
    return tuple(places[path] for path in paths)


def depth_of(paths: Paths) -> int:
    """Depth of the deepest node, which is the number of heads that the tree uses."""
    return max(len(path) for path in paths)


def grow(
    chance: Callable[[tuple[int, ...], int], float], num_heads: int, num_ranks: int, budget: int
) -> tuple[Paths, list[float]]:
    """Grow greedily by expected acceptance: always append the node of the largest value.

    Args:
        chance: ``chance(path, rank)`` is the probability that the next head's ``rank``-th guess is right, given that
            ``path`` is accepted; for the paper's product of accuracies it depends on ``len(path)`` and ``rank`` only.
        num_heads: largest depth.
        num_ranks: guesses of each head that are considered.
        budget: nodes to grow; fewer where no node is worth anything.

    Returns:
        The paths in order of growth, and each node's value: the probability that it is accepted.  1 plus the sum of
        the first ``n`` values is the expected tau of a tree of ``n`` nodes (the bonus token counted).
    """
    # Values fall along a path and a child enters the heap with its parent's removal: the heap's top is the best node
    # whose parent is in the tree.  Ties go to the shallower, then to the lower rank.
    heap: list[tuple[float, int, tuple[int, ...]]] = []

    def offer(path: tuple[int, ...], value: float) -> None:
        if len(path) < num_heads:
            for rank in range(num_ranks):
                if (child := value * chance(path, rank)) > 0:
                    heapq.heappush(heap, (-child, len(path) + 1, (*path, rank)))

    paths, values = [], []
    offer((), 1.0)
    while heap and len(paths) < budget:
        negative, _, path = heapq.heappop(heap)
        paths.append(path)
        values.append(-negative)
        offer(path, -negative)
    return tuple(paths), values


def dense_paths(widths: Sequence[int]) -> Paths:
    """The dense tree of the best ``widths[k]`` guesses of each head below every node of the level before."""
    paths: list[tuple[int, ...]] = []
    level: list[tuple[int, ...]] = [()]
    for width in widths:
        level = [(*path, rank) for path in level for rank in range(width)]
        paths += level
    return tuple(paths)


def dense_widths(num_heads: int, max_nodes: int, num_ranks: int = MAX_RANKS) -> list[tuple[int, ...]]:
    """Widths of the dense trees with at most ``max_nodes`` nodes whose last level is as wide as they allow."""
    found: list[tuple[int, ...]] = []

    def extend(widths: tuple[int, ...], level: int, left: int) -> None:
        largest = min(num_ranks, left // level)
        if len(widths) == num_heads or largest == 0:
            found.append(widths)
            return
        for width in range(largest if len(widths) == num_heads - 1 else 1, largest + 1):
            extend((*widths, width), level * width, left - level * width)

    extend((), 1, max_nodes)
    return found


def grow_from_accuracies(accuracies: Sequence[Sequence[float]], budget: int) -> tuple[Paths, list[float]]:
    """``grow`` for ``accuracies[k][i]``, the accuracy of head ``k``'s ``i``-th guess (the paper's a_k(i))."""
    return grow(lambda path, rank: accuracies[len(path)][rank], len(accuracies), len(accuracies[0]), budget)


def default_tree(num_heads: int, num_ranks: int, budget: int) -> Paths:
    """A tree for heads that were never calibrated.

    Its accuracies are a guess at the usual shape, 0.6 ** k for the best guess of head k, falling with the rank to the
    power of -1.5: good enough to start with, worth replacing by a calibrated tree.
    """
    ranks = range(min(num_ranks, MAX_RANKS))
    return grow_from_accuracies([[0.6**k * (i + 1) ** -1.5 for i in ranks] for k in range(1, num_heads + 1)], budget)[0]
