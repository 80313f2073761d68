"""Learns how likely merged nodes are accepted, from the tokens that the target chose after drafts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vllm_specplug.budget.calibration import OnlineLogistic, sigmoid
from vllm_specplug.core.outcomes import find_outcomes
from vllm_specplug.core.pool import DraftPool
from vllm_specplug.proposers.union.merge import DRAFTED, OMITTED, Merged
from vllm_specplug.types import PADDING


@dataclass(frozen=True)
class ValuedMerge:
    """Merged nodes, with their estimates.

    Attributes:
        merged: the nodes of all sources.
        patterns: int64 ``[num_nodes]``; see ``pattern_of``.
        features: float64 ``[num_nodes, 2 + 2 * num_sources]``: constant 1, logarithm of the depth, the log odds of each
            source, its record in the request.
        log_odds: float64 ``[num_nodes]``; of each node's acceptance, given that its parent is accepted.
        pool: all nodes; the columns of a request are its nodes in the order of ``merged``.
        source_bits: int64, like the pool's columns: bit ``i`` is set where source ``i`` drafted the node.
    """

    merged: Merged
    patterns: np.ndarray
    features: np.ndarray
    log_odds: np.ndarray
    pool: DraftPool
    source_bits: np.ndarray


class MergeLearner:
    """Estimates how likely merged nodes are accepted, and learns it.

    Args:
        num_sources: of the union.

    Attributes:
        calibration: a model for each pattern of agreement.
    """

    def __init__(self, num_sources: int):
        self.calibration = OnlineLogistic(start_weights(num_sources), memory=3000.0)

    def value(self, merged: Merged, ratios: np.ndarray) -> ValuedMerge:
        """Estimate nodes.

        Args:
            merged: of the requests.
            ratios: float64 ``[num_reqs, num_sources]``; log of each source's accepted over expected nodes.
        """
        patterns = pattern_of(merged)
        features = _features(merged, ratios)
        log_odds = self.calibration.log_odds(patterns, features)
        pool, bits = _pool(merged, np.log(sigmoid(log_odds)))
        return ValuedMerge(merged, patterns, features, log_odds, pool, bits)

    def learn(
        self,
        valued: ValuedMerge,
        requests: np.ndarray,
        token_ids: np.ndarray,
        token_rows: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Compare drafted nodes with the tokens that the target chose since.

        Args:
            valued: the nodes.
            requests: int64 ``[n]``; requests of ``valued`` to learn from.
            token_ids, token_rows, starts, ends: of these, as in ``find_outcomes``.

        Returns:
            int64: the nodes with an outcome; bool: whether the target chose their tokens.
        """
        counts, pool = valued.merged.counts, valued.pool
        nodes, _, accepted = find_outcomes(
            (pool.token_ids.numpy(), pool.parents.numpy(), pool.depths.numpy()),
            requests,
            (np.cumsum(counts) - counts)[requests],
            token_ids,
            token_rows,
            starts,
            ends,
        )
        self.calibration.learn(valued.patterns[nodes], valued.features[nodes], accepted)
        return nodes, accepted


def _features(merged: Merged, ratios: np.ndarray) -> np.ndarray:
    """Compute the features of nodes, see ``ValuedMerge``; ``ratios`` as in ``MergeLearner.value``."""
    records = np.where(merged.states.T == DRAFTED, ratios[merged.requests], 0.0)
    columns = [np.ones(len(records)), np.log2(merged.depths), *merged.log_odds, *records.T]
    return np.stack(columns, axis=1)


def _pool(merged: Merged, edges: np.ndarray) -> tuple[DraftPool, np.ndarray]:
    """Make a pool of all nodes.

    Args:
        merged: the nodes.
        edges: float64 ``[num_nodes]``; log probability of each node's acceptance, given that its parent is accepted.

    Returns:
        The pool, and int64 of its shape: bit ``i`` is set where source ``i`` drafted the node.
    """
    begins = np.cumsum(merged.counts) - merged.counts
    first = begins[merged.requests]
    place = (merged.requests, np.arange(len(first)) - first)
    parents = merged.parents - merged.num_reqs  # below 0 for children of the root
    sources = 1 << np.arange(len(merged.states))
    shape = (merged.num_reqs, int(merged.counts.max(initial=1)))

    def spread(values: np.ndarray, fill: float, dtype: type = np.int64) -> np.ndarray:
        rows = np.full(shape, fill, dtype=dtype)
        rows[place] = values
        return rows

    pool = (
        spread(merged.token_ids, PADDING),
        spread(np.where(parents < 0, PADDING, parents - first), PADDING),
        spread(_along_paths(edges, parents, merged.depths), -np.inf, np.float32),
        spread(merged.depths, 0),
    )
    bits = spread(sources @ (merged.states == DRAFTED), 0)
    return DraftPool(*map(torch.from_numpy, pool), size=shape[1]), bits


def _along_paths(edges: np.ndarray, parents: np.ndarray, depths: np.ndarray) -> np.ndarray:
    """Add up ``edges`` from the root to each node, float64 ``[num_nodes]``; a parent below 0 is the root."""
    values = edges.copy()
    for depth in range(2, depths.max(initial=0) + 1):
        nodes = np.flatnonzero(depths == depth)
        values[nodes] += values[parents[nodes]]
    return values


def pattern_of(merged: Merged) -> np.ndarray:
    """Return each node's pattern of agreement, int64 ``[num_nodes]``: its states as the digits of a base-3 number."""
    return (3 ** np.arange(len(merged.states))) @ merged.states


def start_weights(num_sources: int) -> np.ndarray:
    """Return the initial weights of all patterns, float64 ``[3 ** num_sources, 2 + 2 * num_sources]``.

    The estimate of a single source is used as it is.  Estimates of several sources add up with weights below 1, because
    the sources see the same context.  Each source that omitted the node lowers its log odds.
    """
    weights = np.zeros((3**num_sources, 2 + 2 * num_sources))
    for pattern in range(len(weights)):
        states = [pattern // 3**source % 3 for source in range(num_sources)]
        agreeing = states.count(DRAFTED)
        weights[pattern, 0] = 0.4 * max(agreeing - 1, 0) - 0.5 * states.count(OMITTED)
        for source, state in enumerate(states):
            if state == DRAFTED:
                weights[pattern, 2 + source] = (1.0, 0.7, 0.55, 0.45)[agreeing - 1]
                weights[pattern, 2 + num_sources + source] = 0.5 / agreeing
    return weights
