"""Outcomes of drafted nodes, read from the tokens that the target chose after the draft.

A drafted node has an outcome if its parent was right and the target's token at its depth is known.  Nodes that were
drafted but not verified have outcomes too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_specplug.utils.compiled import compiled


def common_requests(request_ids: Sequence[str], others: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the requests that two batches share, int64 ``[n]`` each, in the order of the first."""
    if request_ids == others:
        indices = np.arange(len(request_ids))
        return indices, indices
    index_of = {request_id: index for index, request_id in enumerate(others)}
    shared = [index for index, request_id in enumerate(request_ids) if request_id in index_of]
    found = [index_of[request_ids[index]] for index in shared]
    return np.array(shared, dtype=np.int64), np.array(found, dtype=np.int64)


@compiled
def find_outcomes(
    pool: tuple[np.ndarray, np.ndarray, np.ndarray],
    pool_rows: np.ndarray,
    first_nodes: np.ndarray,
    token_ids: np.ndarray,
    token_rows: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find the drafted nodes that have an outcome.

    Args:
        pool: token ids, parents and depths of a ``DraftPool``, int64 ``[num_drafted, pool_width]``; depth 0 where there
            is no node; a parent has a lower index than its children.
        pool_rows: int64 ``[num_reqs]``; each request's row in ``pool``.
        first_nodes: int64 ``[num_reqs]``; number of the node in column 0 of each request.
        token_ids: int32 ``[batch_size, max_len]``; prompt and output of the requests now.
        token_rows: int64 ``[num_reqs]``; each request's row in ``token_ids``.
        starts: int64 ``[num_reqs]``; tokens that each request had when it was drafted for.
        ends: int64 ``[num_reqs]``; tokens that it has now.

    Returns:
        By request and column, for each node with an outcome: int64 its number (that of column 0 plus its column), int64
        the request's index, bool whether the target chose its token.
    """
    node_ids, parents, depths = pool
    width = node_ids.shape[1]
    nodes, owners = np.empty(len(pool_rows) * width, dtype=np.int64), np.empty(len(pool_rows) * width, dtype=np.int64)
    accepted = np.empty(len(nodes), dtype=np.bool_)
    right = np.empty(width, dtype=np.bool_)
    count = 0
    for owner, row in enumerate(pool_rows):
        num_known = ends[owner] - starts[owner]
        for column in range(width):
            depth, parent = depths[row, column], parents[row, column]
            right[column] = False
            if depth < 1 or depth > num_known or (parent >= 0 and not right[parent]):
                continue
            right[column] = token_ids[token_rows[owner], starts[owner] + depth - 1] == node_ids[row, column]
            nodes[count], owners[count], accepted[count] = first_nodes[owner] + column, owner, right[column]
            count += 1
    return nodes[:count], owners[:count], accepted[:count]
