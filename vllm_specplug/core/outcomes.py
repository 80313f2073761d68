"""Outcomes of drafted nodes, read from the tokens that the target chose after the draft.

A drafted node has an outcome if its parent was right and the target's token at its depth is known.  Nodes that were
drafted but not verified have outcomes too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def common_requests(request_ids: Sequence[str], others: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the requests that two batches share, int64 ``[n]`` each, in the order of the first."""
    if request_ids == others:
        indices = np.arange(len(request_ids))
        return indices, indices
    index_of = {request_id: index for index, request_id in enumerate(others)}
    shared = [index for index, request_id in enumerate(request_ids) if request_id in index_of]
    found = [index_of[request_ids[index]] for index in shared]
    return np.array(shared, dtype=np.int64), np.array(found, dtype=np.int64)


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
    node_ids, parents, depths = (values[pool_rows] for values in pool)
    num_known = (ends - starts)[:, None]
    is_known = (depths >= 1) & (depths <= num_known)
    places = np.where(is_known, starts[:, None] + depths - 1, 0)
    is_right = is_known & (token_ids[token_rows[:, None], places] == node_ids)
    is_reached = is_known & (parents < 0)  # all ancestors are right
    for depth in range(2, num_known.max(initial=0) + 1):
        owners, columns = np.nonzero(is_known & (depths == depth) & (parents >= 0))
        above = parents[owners, columns]
        is_reached[owners, columns] = is_reached[owners, above] & is_right[owners, above]
    owners, columns = np.nonzero(is_reached)
    return first_nodes[owners] + columns, owners, is_right[owners, columns]
