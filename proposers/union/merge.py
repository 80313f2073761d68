"""Merging drafts: nodes with the same tokens on their paths become one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_specplug.budget.calibration import LOGIT_LIMIT
from vllm_specplug.types import Draft
from vllm_specplug.utils.compiled import compiled

#: What a source says of a node: nothing, since it drafted no child of the node's parent; it drafted others; it itself.
ABSENT, SILENT, DRAFTED = 0, 1, 2


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
        counts: int64 ``[num_reqs]``; nodes of each request.
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
        """Requests, those without nodes included."""
        return len(self.counts)


def merge(drafts: Sequence[Draft | None], num_reqs: int) -> Merged:
    """Merge drafts for the same requests.

    Args:
        drafts: of each source, checked (``Guard``); None where it has failed: it says nothing of any node.
        num_reqs: requests of each draft.
    """
    num_sources = len(drafts)
    capacity = 1 + sum(draft.tree.token_ids.shape[1] - 1 for draft in drafts if draft is not None)
    rows = np.empty((NUM_COLUMNS, num_reqs, capacity), dtype=np.int64)
    beliefs = np.empty((num_reqs, capacity, num_sources))
    counts = np.zeros(num_reqs, dtype=np.int64)
    rows[:, :, 0] = 0
    num_nodes = 0
    for source, draft in enumerate(drafts):
        if draft is None:
            continue
        tree = draft.tree
        arrays = (values.numpy() for values in (tree.token_ids, tree.parents, tree.num_rows, draft.log_values))
        num_nodes = _insert(source, *map(np.ascontiguousarray, arrays), LOGIT_LIMIT, rows, beliefs, counts)
    requests, token_ids, parents, depths = np.empty((4, num_nodes), dtype=np.int64)
    states = np.empty((num_sources, num_nodes), dtype=np.int64)
    log_odds = np.empty((num_sources, num_nodes))
    _put_in_order(rows, beliefs, counts, requests, token_ids, parents, depths, states, log_odds)
    return Merged(requests, token_ids, parents, depths, states, log_odds, counts)


#: What is kept of each row while drafts are inserted.  Rows of a request are in the order of their insertion, the root
#: first; the last two columns have a bit for each source: it drafted the row, it drafted a child of the row.
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
    beliefs: np.ndarray,
    counts: np.ndarray,
) -> int:
    """Add the nodes of one draft to the merged trees.

    Args:
        source: its number.
        token_ids, parents, num_rows, log_values: of the draft; ``[num_reqs, width]``, ``num_rows`` ``[num_reqs]``.
        limit: of log odds.
        rows: int64 ``[NUM_COLUMNS, num_reqs, capacity]``; changed.
        beliefs: float64 ``[num_reqs, capacity, num_sources]``; changed.
        counts: int64 ``[num_reqs]``; nodes of each request so far; changed.

    Returns:
        Nodes of all requests so far.
    """
    num_reqs, width = token_ids.shape
    own_bit = 1 << source
    merged = np.zeros(width, dtype=np.int64)  # the merged row of each row; the root's is the root
    total = 0
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
                for other in range(beliefs.shape[2]):
                    beliefs[request, found, other] = 0.0
            rows[EXPANDED_BY, request, parent] |= own_bit
            if not rows[DRAFTED_BY, request, found] & own_bit:  # of equal siblings the first counts
                rows[DRAFTED_BY, request, found] |= own_bit
                edge = np.float64(log_values[request, row]) - np.float64(log_values[request, draft_parent])
                if edge >= 0:
                    belief = limit
                elif edge > -np.inf:  # neither -inf nor NaN, which comes of -inf behind -inf
                    belief = edge - math.log(-math.expm1(edge))
                else:
                    belief = -limit
                beliefs[request, found, source] = min(max(belief, -limit), limit)
            merged[row] = found
        total += counts[request]
    return total


@compiled
def _put_in_order(
    rows: np.ndarray,
    beliefs: np.ndarray,
    counts: np.ndarray,
    requests: np.ndarray,
    token_ids: np.ndarray,
    parents: np.ndarray,
    depths: np.ndarray,
    states: np.ndarray,
    log_odds: np.ndarray,
) -> None:
    """Fill the arrays of ``Merged`` from ``requests`` on; the others are those of ``_insert``."""
    num_reqs, num_sources = len(counts), len(states)
    most = rows.shape[2]
    place = np.empty(most, dtype=np.int64)  # of each of a request's rows, over rows
    starts = np.empty(most + 1, dtype=np.int64)  # of each depth
    begin = 0
    for request in range(num_reqs):
        count = counts[request]
        for depth in range(count + 2):
            starts[depth] = 0
        for row in range(1, count + 1):
            starts[rows[DEPTH, request, row] + 1] += 1
        for depth in range(1, count + 2):
            starts[depth] += starts[depth - 1]
        place[0] = request
        for row in range(1, count + 1):
            parent, depth = rows[PARENT, request, row], rows[DEPTH, request, row]
            node = begin + starts[depth]
            starts[depth] += 1
            place[row] = num_reqs + node
            requests[node] = request
            token_ids[node] = rows[TOKEN, request, row]
            parents[node] = place[parent]
            depths[node] = depth
            drafted_by, expanded_by = rows[DRAFTED_BY, request, row], rows[EXPANDED_BY, request, parent]
            for source in range(num_sources):
                if drafted_by >> source & 1:
                    states[source, node] = DRAFTED
                elif expanded_by >> source & 1:
                    states[source, node] = SILENT
                else:
                    states[source, node] = ABSENT
                log_odds[source, node] = beliefs[request, row, source]
        begin += count
