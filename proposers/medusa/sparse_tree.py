"""Sparse trees: the combinations of the heads' ranked predictions to draft (Medusa, section 2.3.3).

A node is a path of ranks: ``(0, 2)``, at depth 2, is the second head's third guess after the first head's best guess.
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

#: Guesses per head that the default tree and the calibration consider.
MAX_RANKS = 32


def read_tree(file: str | Path) -> Paths:
    """Read the tree of a JSON file: a list of rank paths, or an object with the list at ``medusa_choices``.

    Raises:
        ConfigError: the file cannot be read or has no tree.
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
        raise ConfigError(f"{where} has {len(value)} nodes: give at most {MAX_NUM_SPECULATIVE_TOKENS}")
    seen: set[tuple[int, ...]] = {()}
    paths = []
    for entry in value:
        if (
            not isinstance(entry, list | tuple)
            or not entry
            or any(isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 for rank in entry)
        ):
            raise ConfigError(f"{where}: {entry!r:.80} is no rank path: give a list of ranks from 0, like [0, 2]")
        path = tuple(entry)
        if path in seen:
            raise ConfigError(f"{where} has the node {list(path)} twice: leave one out")
        if path[:-1] not in seen:
            raise ConfigError(f"{where} has no parent of {list(path)}: list {list(path[:-1])} before it")
        seen.add(path)
        paths.append(path)
    return tuple(paths)


def check_heads(paths: Paths, num_heads: int, draft_vocab_size: int, where: str) -> None:
    """Check that the heads can fill a tree; ``where`` names it in messages.

    Raises:
        ConfigError: the tree is deeper than there are heads, or a rank is beyond the vocabulary.
    """
    for path in paths:
        if len(path) > num_heads:
            raise ConfigError(
                f"{where} needs {len(path)} heads (node {list(path)}), the checkpoint has {num_heads}: leave out "
                f"the nodes deeper than {num_heads}, or train more heads"
            )
        if max(path) >= draft_vocab_size:
            raise ConfigError(
                f"{where}: the rank {max(path)} of node {list(path)} is beyond the heads' vocabulary of "
                f"{draft_vocab_size}: ranks count from 0"
            )


def parents_of(paths: Paths) -> tuple[int, ...]:
    """Row of each node's parent, as an argument of ``tree.static_tree`` (row 0 is the root)."""
    rows = {(): 0} | {path: row for row, path in enumerate(paths, start=1)}
    return tuple(rows[path[:-1]] for path in paths)


def in_draw_order(paths: Paths) -> Paths:
    """The same shape with siblings ranked 0, 1, 2, ... in the list's order, which is the order of sampled siblings."""
    renamed: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
    counts: dict[tuple[int, ...], int] = {}
    for path in paths:
        rank = counts.get(path[:-1], 0)
        counts[path[:-1]] = rank + 1
        renamed[path] = (*renamed[path[:-1]], rank)
    return tuple(renamed[path] for path in paths)


def depth_of(paths: Paths) -> int:
    """Depth of the deepest node: the number of heads that the tree uses."""
    return max(len(path) for path in paths)


def grow(
    probability: Callable[[tuple[int, ...], int], float], num_heads: int, num_ranks: int, budget: int
) -> tuple[Paths, list[float]]:
    """Grow a tree greedily: always append the node of the largest value.

    Args:
        probability: ``probability(path, rank)``: that the next head's ``rank``-th guess is right if ``path`` is
            accepted.  For the paper's product of accuracies it depends on ``len(path)`` and ``rank`` only.
        num_heads: largest depth.
        num_ranks: guesses of each head to consider.
        budget: nodes to grow; nodes of value 0 are not grown.

    Returns:
        The paths in order of growth, and each node's value: the probability that it is accepted.  1 plus the sum of
        the first ``n`` values is the expected tau of a tree of ``n`` nodes (the bonus token counted).
    """
    # Values do not rise along a path, and a child enters the heap when its parent leaves it.  So the heap's top is the
    # best node whose parent is in the tree.  Of equal values the lower depth comes first, then the lower ranks.
    heap: list[tuple[float, int, tuple[int, ...]]] = []

    def push_children(path: tuple[int, ...], value: float) -> None:
        if len(path) < num_heads:
            for rank in range(num_ranks):
                if (child := value * probability(path, rank)) > 0:
                    heapq.heappush(heap, (-child, len(path) + 1, (*path, rank)))

    paths, values = [], []
    push_children((), 1.0)
    while heap and len(paths) < budget:
        negative, _, path = heapq.heappop(heap)
        paths.append(path)
        values.append(-negative)
        push_children(path, -negative)
    return tuple(paths), values


def grow_from_accuracies(accuracies: Sequence[Sequence[float]], budget: int) -> tuple[Paths, list[float]]:
    """``grow`` for ``accuracies[k][i]``, the accuracy of head ``k``'s ``i``-th guess (the paper's a_k(i))."""
    return grow(lambda path, rank: accuracies[len(path)][rank], len(accuracies), len(accuracies[0]), budget)


def default_tree(num_heads: int, num_ranks: int, budget: int) -> Paths:
    """A tree for heads without a calibration.

    It assumes accuracies of 0.6 ** k for the best guess of head k, which fall with the rank to the power of -1.5.  A
    calibrated tree is better.
    """
    ranks = range(min(num_ranks, MAX_RANKS))
    return grow_from_accuracies([[0.6**k * (i + 1) ** -1.5 for i in ranks] for k in range(1, num_heads + 1)], budget)[0]
