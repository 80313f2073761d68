"""Merging drafts: nodes with the same tokens on their paths become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_specplug.calibration import log_odds_of
from vllm_specplug.types import Draft

#: What a source says of a node: nothing, since it drafted no child of the node's parent; it drafted others; it itself.
ABSENT, SILENT, DRAFTED = 0, 1, 2

_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Merged:
    """The nodes of all sources, each path once; one flat list over requests, ordered by request, depth, source.

    ``num_nodes`` counts the nodes of all requests; entry ``num_reqs + i`` of an array "over rows" is node ``i``, the
    first ``num_reqs`` entries are the roots.

    Attributes:
        requests: int64 ``[num_nodes]``.
        token_ids: int64 ``[num_nodes]``.
        parents: int64 ``[num_nodes]``; index over rows, lower than the node's own.
        depths: int64 ``[num_nodes]``; from 1.
        states: int64 ``[num_sources, num_nodes]``; ``ABSENT``, ``SILENT`` or ``DRAFTED``.
        log_odds: float64 ``[num_sources, num_nodes]``; the source's belief that the node is accepted once its parent
            is; 0 where it did not draft it.
        num_reqs: requests, those without nodes included.
    """

    requests: np.ndarray
    token_ids: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    states: np.ndarray
    log_odds: np.ndarray
    num_reqs: int

    def along_paths(self, edges: np.ndarray, root: float | bool, combine: np.ufunc) -> np.ndarray:
        """Combine a value of each node with its parent's result, from the roots down: ``[num_nodes]``."""
        rows = np.empty(self.num_reqs + len(edges), dtype=edges.dtype)
        rows[: self.num_reqs] = root
        for level in self.levels():
            rows[self.num_reqs + level] = combine(rows[self.parents[level]], edges[level])
        return rows[self.num_reqs :]

    def levels(self) -> list[np.ndarray]:
        """Indices of the nodes of each depth."""
        return _levels(self.depths)


def merge(drafts: Sequence[Draft | None], num_reqs: int) -> Merged:
    """Merge drafts for the same requests.

    Args:
        drafts: of each source; None where it has failed: it says nothing of any node.
        num_reqs: requests of each draft.
    """
    requests, token_ids, parents, depths, sources, log_odds = _flatten(drafts, num_reqs)
    # A path's hash; two paths of one hash would only share a node that one of them did not draft.
    paths = np.empty(num_reqs + len(requests), dtype=np.uint64)
    paths[:num_reqs] = np.arange(1, num_reqs + 1)
    for level in _levels(depths):
        mixed = (paths[parents[level]] ^ (paths[parents[level]] >> np.uint64(29))) * _MIX
        mixed += token_ids[level].astype(np.uint64) + np.uint64(1)
        paths[num_reqs + level] = (mixed ^ (mixed >> np.uint64(32))) * _MIX
    _, first, group = np.unique(paths[num_reqs:], return_index=True, return_inverse=True)
    # Parents come first among a source's nodes, so the first of a path comes behind the first of its parent's.
    order = np.lexsort((first, depths[first], requests[first]))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    group, first = place[group], first[order]
    row_of = np.concatenate([np.arange(num_reqs), num_reqs + group])
    merged_parents = row_of[parents[first]]

    num_sources, num_nodes = len(drafts), len(first)
    states = np.full((num_sources, num_nodes), ABSENT)
    beliefs = np.zeros((num_sources, num_nodes))
    expanded = np.zeros((num_sources, num_reqs + num_nodes), dtype=bool)
    expanded[sources, row_of[parents]] = True
    states[expanded[:, merged_parents]] = SILENT
    states[sources, group] = DRAFTED
    # Of equal siblings the first counts: it is written last.  (numpy would undo a reversed view.)
    beliefs[tuple(values[::-1].copy() for values in (sources, group))] = log_odds[::-1].copy()
    return Merged(requests[first], token_ids[first], merged_parents, depths[first], states, beliefs, num_reqs)


def _flatten(drafts: Sequence[Draft | None], num_reqs: int) -> tuple[np.ndarray, ...]:
    """Nodes of all drafts in one list: request, token, parent (index over rows), depth, source, log odds."""
    columns: list[tuple[np.ndarray, ...]] = []
    count = 0
    for source, draft in enumerate(drafts):
        if draft is None:
            continue
        tree = draft.tree
        token_ids, parents, depths, num_rows = (
            values.numpy() for values in (tree.token_ids, tree.parents, tree.depths, tree.num_rows)
        )
        width = token_ids.shape[1]
        rows = np.arange(width)
        requests, nodes = np.nonzero((rows < num_rows[:, None]) & (rows > 0))
        parent = parents[requests, nodes]
        # Row of the flat list: a root's is its request, a node's follows from the nodes before it.
        flat = np.empty((num_reqs, width), dtype=np.int64)
        flat[:, 0] = np.arange(num_reqs)
        flat[requests, nodes] = num_reqs + count + np.arange(len(requests))
        values = draft.log_values.numpy().astype(np.float64)
        with np.errstate(invalid="ignore"):
            edge = np.minimum(values[requests, nodes] - values[requests, parent], 0.0)
        edge = np.where(np.isnan(edge), -np.inf, edge)
        columns.append(
            (
                requests,
                token_ids[requests, nodes],
                flat[requests, parent],
                depths[requests, nodes],
                np.full(len(requests), source),
                log_odds_of(edge),
            )
        )
        count += len(requests)
    if not columns:
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty, empty, empty, empty, np.zeros(0)
    return tuple(np.concatenate(column) for column in zip(*columns, strict=True))


def _levels(depths: np.ndarray) -> list[np.ndarray]:
    """Indices of the nodes of each depth from 1 on."""
    order = np.argsort(depths, kind="stable")
    return np.split(order, np.cumsum(np.bincount(depths)[1:])[:-1]) if len(depths) else []
