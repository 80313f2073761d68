"""Learns which matches are reliable, from the tokens that the target chose after drafts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_specplug.budget.calibration import OnlineLogistic
from vllm_specplug.core.outcomes import find_outcomes
from vllm_specplug.core.pool import DraftPool
from vllm_specplug.proposers.lookup.matches import Matches
from vllm_specplug.proposers.lookup.prefix_tree import SCOPES, START_WEIGHTS, PrefixTree, build_prefix_tree, make_pool


@dataclass(frozen=True)
class ValuedMatches:
    """The matches of some requests, with their estimates.

    Attributes:
        tree: of these requests.
        log_odds: float64, like ``tree.nodes``; of each node's acceptance, given that its parent is accepted.
        pool: the nodes of ``tree``.
        pool_rows: int64 ``[num_reqs]``; each request's row in ``pool``.
    """

    tree: PrefixTree
    log_odds: np.ndarray
    pool: DraftPool
    pool_rows: np.ndarray

    def of_nodes(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return models, features and log odds of nodes (int64 ``[n]``, numbered as by ``MatchLearner.learn``)."""
        features = self.tree.features.reshape(-1, self.tree.features.shape[-1])
        return self.tree.models.ravel()[nodes], features[nodes], self.log_odds.ravel()[nodes]


class MatchLearner:
    """Estimates how likely the continuations of matches are accepted, and learns it.

    Attributes:
        calibration: the models of ``SCOPES``.
    """

    def __init__(self) -> None:
        self.calibration = OnlineLogistic(np.array([START_WEIGHTS[scope] for scope in SCOPES]))

    def value(
        self, matches: Matches, request_features: np.ndarray, pool_rows: np.ndarray, num_rows: int
    ) -> ValuedMatches:
        """Build the tree of matches and estimate its nodes.

        Args:
            matches: of some requests of the batch.
            request_features: float64 ``[num_reqs]``; the feature "request".
            pool_rows, num_rows: ``rows`` and ``num_rows`` of ``make_pool``.
        """
        tree = build_prefix_tree(matches, request_features)
        log_odds = self.calibration.log_odds(tree.models, tree.features)
        return ValuedMatches(tree, log_odds, make_pool(tree, log_odds, pool_rows, num_rows), pool_rows)

    def learn(
        self,
        valued: ValuedMatches,
        requests: np.ndarray,
        token_ids: np.ndarray,
        token_rows: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Compare drafted nodes with the tokens that the target chose since.

        Args:
            valued: the nodes.
            requests: int64 ``[n]``; requests of ``valued`` to learn from.
            token_ids, token_rows, starts, ends: of these, as in ``find_outcomes``.

        Returns:
            The result of ``find_outcomes``.
        """
        pool = valued.pool
        found = find_outcomes(
            (pool.token_ids.numpy(), pool.parents.numpy(), pool.depths.numpy()),
            valued.pool_rows[requests],
            requests * pool.size,
            token_ids,
            token_rows,
            starts,
            ends,
        )
        nodes, _, accepted = found
        models, features, _ = valued.of_nodes(nodes)
        self.calibration.learn(models, features, accepted)
        return found
