"""Merging of drafts: nodes with the same tokens on their paths become one node."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_specplug.budget.calibration import LOGIT_LIMIT
from vllm_specplug.types import Draft
from vllm_specplug.utils.compiled import compiled

#: What a source did at a node: it drafted no child of the node's parent; it drafted only siblings of the node; it
#: drafted the node.
NOT_EXPANDED, OMITTED, DRAFTED = 0, 1, 2


@dataclass(frozen=True)
class Merged:
    """The nodes of all sources in one list, each path once, ordered by request, depth and source.

    ``num_nodes`` counts the nodes of all requests.  In a list of all rows, the ``num_reqs`` roots come first, and node
    ``i`` is entry ``num_reqs + i``.

    Attributes:
        requests: int64 ``[num_nodes]``; index of the node's request.
        token_ids: int64 ``[num_nodes]``.
        parents: int64 ``[num_nodes]``; the parent's entry in the list of all rows, lower than the node's own.
        depths: int64 ``[num_nodes]``; from 1.
        states: int64 ``[num_sources, num_nodes]``; ``NOT_EXPANDED``, ``OMITTED`` or ``DRAFTED``.
        log_odds: float64 ``[num_sources, num_nodes]``; log odds of the node's acceptance given that its parent is
            accepted, as the source estimates them; 0 where it did not draft the node.
        counts: int64 ``[num_reqs]``; number of nodes of each request.
    """

    requests: np.ndarray
    token_ids: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    states: np.ndarray
    log_odds: np.ndarray
    counts: np.ndarray

    @property
    def num_reqs(self) -> int:
        """Number of requests, including those without nodes."""
        return len(self.counts)


def merge(drafts: Sequence[Draft | None], num_reqs: int) -> Merged:
    """Merge drafts for the same requests.

    Args:
        drafts: one per source, checked by ``Guard``; None for a source that has failed: it expands no node.
        num_reqs: number of requests in each draft.
    """
    num_sources = len(drafts)
    capacity = 1 + sum(draft.tree.token_ids.shape[1] - 1 for draft in drafts if draft is not None)
    rows = np.empty((NUM_COLUMNS, num_reqs, capacity), dtype=np.int64)
    log_odds = np.empty((num_reqs, capacity, num_sources))
    counts = np.zeros(num_reqs, dtype=np.int64)
    rows[:, :, 0] = 0
    for source, draft in enumerate(drafts):
        if draft is None:
            continue
        tree = draft.tree
        arrays = (values.numpy() for values in (tree.token_ids, tree.parents, tree.num_rows, draft.log_values))
        _insert(source, *map(np.ascontiguousarray, arrays), LOGIT_LIMIT, rows, log_odds, counts)
    return Merged(*_in_order(rows, log_odds, counts), counts)


#: Columns of a row while drafts are inserted.  The rows of a request are in insertion order, the root first.  The last
#: two columns have one bit per source: set where it drafted the row, or a child of the row.
TOKEN, PARENT, DEPTH, FIRST_CHILD, NEXT_SIBLING, DRAFTED_BY, EXPANDED_BY = range(7)
NUM_COLUMNS = 7


@compiled
def _insert(
    source: int,
    token_ids: np.ndarray,
    parents: np.ndarray,
    num_rows: np.ndarray,
    log_values: np.ndarray,
    limit: float,
    rows: np.ndarray,
    log_odds: np.ndarray,
    counts: np.ndarray,
) -> None:
    """Add the nodes of one draft to the merged trees.

    Args:
        source: index of the draft's source.
        token_ids, parents, num_rows, log_values: of the draft; ``[num_reqs, width]``, ``num_rows`` ``[num_reqs]``.
        limit: of log odds.
        rows: int64 ``[NUM_COLUMNS, num_reqs, capacity]``; updated.
        log_odds: float64 ``[num_reqs, capacity, num_sources]``; updated.
        counts: int64 ``[num_reqs]``; nodes of each request so far; updated.
    """
    num_reqs, width = token_ids.shape
    own_bit = 1 << source
    merged = np.zeros(width, dtype=np.int64)  # the merged row of each row of the draft; the root's is the root
    for request in range(num_reqs):
        for row in range(1, num_rows[request]):
            draft_parent = parents[request, row]
            parent, token = merged[draft_parent], token_ids[request, row]
            found = rows[FIRST_CHILD, request, parent]
            while found != 0 and rows[TOKEN, request, found] != token:
                found = rows[NEXT_SIBLING, request, found]
            if found == 0:
                counts[request] += 1
                found = counts[request]
                rows[TOKEN, request, found] = token
                rows[PARENT, request, found] = parent
                rows[DEPTH, request, found] = rows[DEPTH, request, parent] + 1
                rows[NEXT_SIBLING, request, found] = rows[FIRST_CHILD, request, parent]
                rows[FIRST_CHILD, request, parent] = found
                rows[FIRST_CHILD, request, found] = 0
                rows[DRAFTED_BY, request, found] = 0
                rows[EXPANDED_BY, request, found] = 0
                for other in range(log_odds.shape[2]):
                    log_odds[request, found, other] = 0.0
            rows[EXPANDED_BY, request, parent] |= own_bit
            if not rows[DRAFTED_BY, request, found] & own_bit:  # the first of equal siblings counts
                rows[DRAFTED_BY, request, found] |= own_bit
                edge = np.float64(log_values[request, row]) - np.float64(log_values[request, draft_parent])
                log_odds[request, found, source] = _edge_log_odds(edge, limit)
            merged[row] = found


@compiled
def _edge_log_odds(edge: float, limit: float) -> float:
    """Compute ``calibration.log_odds_of`` for one log probability; NaN (the difference of two -inf) counts as -inf."""
    if edge >= 0:
        return limit
    if not edge > -np.inf:
        return -limit
    return min(max(edge - math.log(-math.expm1(edge)), -limit), limit)


@compiled
def _in_order(
    rows: np.ndarray, log_odds_by_row: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Compute the fields of ``Merged`` up to ``log_odds`` from the arrays of ``_insert``."""
    num_reqs, most, num_sources = log_odds_by_row.shape
    num_nodes = counts.sum()
    requests, token_ids = np.empty(num_nodes, dtype=np.int64), np.empty(num_nodes, dtype=np.int64)
    parents, depths = np.empty(num_nodes, dtype=np.int64), np.empty(num_nodes, dtype=np.int64)
    states, log_odds = np.empty((num_sources, num_nodes), dtype=np.int64), np.empty((num_sources, num_nodes))
    entries = np.empty(most, dtype=np.int64)  # by row of a request: its entry in the list of all rows
    starts = np.empty(most + 1, dtype=np.int64)  # by depth
    begin = 0
    for request in range(num_reqs):
        count = counts[request]
        for depth in range(count + 2):
            starts[depth] = 0
        for row in range(1, count + 1):
            starts[rows[DEPTH, request, row] + 1] += 1
        for depth in range(1, count + 2):
            starts[depth] += starts[depth - 1]
        entries[0] = request
        for row in range(1, count + 1):
            parent, depth = rows[PARENT, request, row], rows[DEPTH, request, row]
            node = begin + starts[depth]
            starts[depth] += 1
            entries[row] = num_reqs + node
            requests[node] = request
            token_ids[node] = rows[TOKEN, request, row]
            parents[node] = entries[parent]
            depths[node] = depth
            drafted_by, expanded_by = rows[DRAFTED_BY, request, row], rows[EXPANDED_BY, request, parent]
            for source in range(num_sources):
                if drafted_by >> source & 1:
                    states[source, node] = DRAFTED
                elif expanded_by >> source & 1:
                    states[source, node] = OMITTED
                else:
                    states[source, node] = NOT_EXPANDED
                log_odds[source, node] = log_odds_by_row[request, row, source]
        begin += count
    return requests, token_ids, parents, depths, states, log_odds
