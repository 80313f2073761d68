"""Learns how likely merged nodes are accepted, from the tokens that the target chose behind drafts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from vllm_specplug.budget.calibration import OnlineLogistic, Reliability, sigmoid
from vllm_specplug.core.outcomes import find_outcomes
from vllm_specplug.core.pool import DraftPool
from vllm_specplug.proposers.union.merge import DRAFTED, OMITTED, Merged
from vllm_specplug.types import PADDING
from vllm_specplug.utils.compiled import compiled


@dataclass(frozen=True)
class ValuedMerge:
    """Merged nodes with what was estimated of them.

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
        reliability: compares estimates with outcomes.
    """

    def __init__(self, num_sources: int):
        self.calibration = OnlineLogistic(start_weights(num_sources), memory=3000.0)
        self.reliability = Reliability()

    def value(self, merged: Merged, ratios: np.ndarray) -> ValuedMerge:
        """Estimate nodes.

        Args:
            merged: of the requests.
            ratios: float64 ``[num_reqs, num_sources]``; log of each source's accepted over expected nodes.
        """
        patterns = pattern_of(merged)
        features = _features(merged.requests, merged.depths, merged.states, merged.log_odds, ratios)
        log_odds = self.calibration.log_odds(patterns, features)
        *pool, bits = _pool(
            merged.token_ids, merged.parents, merged.depths, merged.states, merged.counts, np.log(sigmoid(log_odds))
        )
        pool = DraftPool(*map(torch.from_numpy, pool), size=bits.shape[1])
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
        self.reliability.add(sigmoid(valued.log_odds[nodes]), accepted)
        self.calibration.learn(valued.patterns[nodes], valued.features[nodes], accepted)
        return nodes, accepted


@compiled
def _features(
    requests: np.ndarray, depths: np.ndarray, states: np.ndarray, log_odds: np.ndarray, ratios: np.ndarray
) -> np.ndarray:
    """Compute the features of nodes, see ``ValuedMerge``.

    Args:
        requests, depths, states, log_odds: of ``Merged``.
        ratios: float64 ``[num_reqs, num_sources]``; log of each source's accepted over expected nodes in the request.
    """
    num_sources = len(states)
    features = np.empty((len(requests), 2 + 2 * num_sources))
    for node in range(len(requests)):
        features[node, 0] = 1.0
        features[node, 1] = math.log2(depths[node])
        for source in range(num_sources):
            drafted = states[source, node] == DRAFTED
            features[node, 2 + source] = log_odds[source, node]
            features[node, 2 + num_sources + source] = ratios[requests[node], source] if drafted else 0.0
    return features


@compiled
def _pool(
    merged_ids: np.ndarray,
    merged_parents: np.ndarray,
    merged_depths: np.ndarray,
    states: np.ndarray,
    counts: np.ndarray,
    edges: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Make a pool of all nodes.

    Args:
        merged_ids, merged_parents, merged_depths, states, counts: of ``Merged``.
        edges: float64 ``[num_nodes]``; log probability of each node's acceptance, given that its parent is accepted.

    Returns:
        Token ids, parents, log values and depths of a ``DraftPool``, and int64, same shape: bit ``i`` is set where
        source ``i`` drafted the node.
    """
    num_reqs, width = len(counts), 1
    for count in counts:
        width = max(width, count)
    token_ids, parents = np.empty((num_reqs, width), dtype=np.int64), np.empty((num_reqs, width), dtype=np.int64)
    depths, bits = np.empty((num_reqs, width), dtype=np.int64), np.empty((num_reqs, width), dtype=np.int64)
    log_values = np.empty((num_reqs, width), dtype=np.float32)
    values = np.empty(len(edges))
    begin = 0
    for request in range(num_reqs):
        for column in range(counts[request]):
            node = begin + column
            parent = merged_parents[node] - num_reqs  # below 0 for children of the root
            values[node] = edges[node] if parent < 0 else values[parent] + edges[node]
            token_ids[request, column] = merged_ids[node]
            parents[request, column] = PADDING if parent < 0 else parent - begin
            depths[request, column] = merged_depths[node]
            log_values[request, column] = values[node]
            bits[request, column] = 0
            for source in range(len(states)):
                if states[source, node] == DRAFTED:
                    bits[request, column] |= 1 << source
        for column in range(counts[request], width):
            token_ids[request, column] = PADDING
            parents[request, column] = PADDING
            depths[request, column] = 0
            log_values[request, column] = -np.inf
            bits[request, column] = 0
        begin += counts[request]
    return token_ids, parents, log_values, depths, bits


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
