"""The prefix tree of continuations, and the estimated acceptance probability of its nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from vllm_specplug.budget.calibration import LOGIT_LIMIT
from vllm_specplug.core.pool import NEVER, DraftPool
from vllm_specplug.proposers.lookup.index import BREAK
from vllm_specplug.proposers.lookup.matches import Matches
from vllm_specplug.types import PADDING
from vllm_specplug.utils.compiled import compiled

#: Features of a node: constant 1; match length; share of the parent's weight; number of supporting matches; age of the
#: match; how the request's matches did so far.  ``_prefix_tree`` computes them.
FEATURES = ("one", "match", "share", "support", "age", "request")
NUM_FEATURES, REQUEST = len(FEATURES), FEATURES.index("request")

#: Logistic models, by where the supporting matches are: the request itself, traffic, both.
SCOPES = ("own", "traffic", "both")

#: Initial weights of each model: a logistic fit to 78,000 nodes (51% accepted), drafted along 400 answers of
#: SmolLM2-135M-Instruct to training prompts.  While serving, some hundred outcomes are enough to replace them.
START_WEIGHTS = {
    "own": (-0.86, 0.72, 0.86, 0.41, -0.54, 0.59),
    "traffic": (-2.02, 0.49, 1.01, -0.24, 0.06, 0.49),
    "both": (-0.80, 0.72, 0.69, -0.01, 0.03, 0.26),
}


@dataclass(frozen=True)
class PrefixTree:
    """The continuations as a tree: cell ``[r, d, k]`` is token ``d`` of continuation ``k`` of request ``r``.

    Attributes:
        token_ids: int64 ``[num_reqs, draft_depth, num_matches]``.
        leaders: int64, same shape; the first continuation with the same tokens up to this one, which represents all of
            them; 0 where there is no token.
        nodes: bool, same shape; true for the tree's nodes: the cells of leaders.
        features: float64 ``[num_reqs, draft_depth, num_matches, num_features]``; 0 where there is no node.
        models: int64, same shape as ``nodes``; index into ``SCOPES``; 0 where there is no node.
    """

    token_ids: np.ndarray
    leaders: np.ndarray
    nodes: np.ndarray
    features: np.ndarray
    models: np.ndarray


def build_prefix_tree(matches: Matches, request_features: np.ndarray) -> PrefixTree:
    """Merge continuations: equal tokens after equal prefixes are one node.

    Args:
        matches: the continuations.
        request_features: float64 ``[num_reqs]``; the feature "request".
    """
    return PrefixTree(
        *_prefix_tree(matches.continuations, matches.lengths, matches.ages, matches.own, request_features)
    )


def make_pool(tree: PrefixTree, log_odds: np.ndarray, rows: np.ndarray, num_rows: int) -> DraftPool:
    """Make a pool of a prefix tree's nodes; column ``d * num_matches + k`` is cell ``[d, k]``.

    Args:
        tree: of some requests of the batch.
        log_odds: float64, like ``tree.nodes``; of each node's acceptance, given that its parent is accepted.
        rows: int64; the pool row of each request of the tree.
        num_rows: rows of the pool; the rows of other requests are empty.
    """
    pool = _pool(tree.token_ids, tree.leaders, tree.nodes, log_odds, LOGIT_LIMIT, rows, num_rows)
    return DraftPool(*map(torch.from_numpy, pool), size=pool[0].shape[1])


@compiled
def _prefix_tree(
    continuations: np.ndarray, lengths: np.ndarray, ages: np.ndarray, own: np.ndarray, request_features: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Compute the fields of ``PrefixTree``, see ``build_prefix_tree``."""
    num_reqs, count, depth = continuations.shape
    token_ids = np.empty((num_reqs, depth, count), dtype=np.int64)
    leaders = np.zeros((num_reqs, depth, count), dtype=np.int64)
    nodes = np.zeros((num_reqs, depth, count), dtype=np.bool_)
    features = np.zeros((num_reqs, depth, count, NUM_FEATURES))
    models = np.zeros((num_reqs, depth, count), dtype=np.int64)
    exists, parents = np.empty(count, dtype=np.bool_), np.empty(count, dtype=np.int64)
    weights, parent_weight, weight = np.empty(count), np.empty(count), np.empty(count)
    support, own_support = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    for request in range(num_reqs):
        longest, total = 0, 0.0
        for k in range(count):
            longest = max(longest, lengths[request, k])
        for k in range(count):
            exists[k], parents[k] = lengths[request, k] > 0, 0
            # Each token by which a match is longer doubles its weight; the longest match weighs 1.
            weights[k] = 2.0 ** (lengths[request, k] - longest) if exists[k] else 0.0
            total += weights[k]
        parent_weight[:] = total
        for d in range(depth):
            weight[:], support[:], own_support[:] = 0.0, 0, 0
            for k in range(count):
                token = continuations[request, k, d]
                token_ids[request, d, k] = token
                exists[k] &= token != BREAK
                if not exists[k]:
                    continue
                leader = 0
                while not (exists[leader] and parents[leader] == parents[k] and token_ids[request, d, leader] == token):
                    leader += 1
                leaders[request, d, k] = leader
                weight[leader] += weights[k]
                support[leader] += 1
                own_support[leader] += own[request, k]
            for k in range(count):
                if exists[k] and leaders[request, d, k] == k:
                    nodes[request, d, k] = True
                    of_node = features[request, d, k]
                    of_node[0] = 1.0
                    # The node matters only if its ancestors are accepted: they then lengthen the match.
                    of_node[1] = math.log2(min(lengths[request, k] + d, 64))
                    of_node[2] = math.log((weight[k] + 1e-3) / (max(parent_weight[k] - weight[k], 0.0) + 0.5))
                    of_node[3] = math.log2(support[k])
                    of_node[4] = math.log2(1.0 + ages[request, k]) / 10
                    of_node[5] = request_features[request]
                    models[request, d, k] = 1 if own_support[k] == 0 else 2 if own_support[k] < support[k] else 0
            for k in range(count):
                parents[k] = leaders[request, d, k]
                parent_weight[k] = weight[parents[k]]
    return token_ids, leaders, nodes, features, models


@compiled
def _pool(
    token_ids: np.ndarray,
    leaders: np.ndarray,
    nodes: np.ndarray,
    log_odds: np.ndarray,
    limit: float,
    rows: np.ndarray,
    num_rows: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Compute token ids, parents, log values and depths of the ``DraftPool``, see ``make_pool``."""
    _, depth, count = nodes.shape
    shape = (num_rows, depth * count)
    pool_token_ids = np.full(shape, PADDING, dtype=np.int64)
    pool_parents = np.full(shape, PADDING, dtype=np.int64)
    pool_log_values = np.full(shape, NEVER, dtype=np.float32)
    pool_depths = np.zeros(shape, dtype=np.int64)
    log_values = np.zeros((depth, count))
    for request, row in enumerate(rows):
        for d in range(depth):
            for k in range(count):
                if not nodes[request, d, k]:
                    continue
                value = -math.log(1 + math.exp(min(max(-log_odds[request, d, k], -limit), limit)))
                parent = leaders[request, d - 1, k] if d else PADDING
                if d:
                    value += log_values[d - 1, parent]
                    parent += (d - 1) * count
                log_values[d, k] = value
                column = d * count + k
                pool_token_ids[row, column] = token_ids[request, d, k]
                pool_parents[row, column] = parent
                pool_log_values[row, column] = value
                pool_depths[row, column] = d + 1
    return pool_token_ids, pool_parents, pool_log_values, pool_depths
