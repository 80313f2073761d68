"""The prefix tree of continuations, and the estimated acceptance probability of its nodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vllm_specplug.budget.calibration import LOGIT_LIMIT
from vllm_specplug.core.pool import DraftPool
from vllm_specplug.cpu.kernels.cpu_ops import call
from vllm_specplug.proposers.lookup.matches import Matches

#: Features of a node: constant 1; match length; share of the parent's weight; number of supporting matches; age of the
#: match; how the request's matches did so far.  ``lookup.cpp`` computes them.
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
        *call(
            "lookup_prefix_tree",
            matches.continuations,
            matches.lengths,
            matches.ages,
            matches.own,
            request_features,
        )
    )


def make_pool(tree: PrefixTree, log_odds: np.ndarray, rows: np.ndarray, num_rows: int) -> DraftPool:
    """Make a pool of a prefix tree's nodes; column ``d * num_matches + k`` is cell ``[d, k]``.

    Args:
        tree: of some requests of the batch.
        log_odds: float64, like ``tree.nodes``; of each node's acceptance, given that its parent is accepted.
        rows: int64; the pool row of each request of the tree.
        num_rows: rows of the pool; the rows of other requests are empty.
    """
    pool = call("lookup_pool", tree.token_ids, tree.leaders, tree.nodes, log_odds, LOGIT_LIMIT, rows, num_rows)
    return DraftPool(*map(torch.from_numpy, pool), size=pool[0].shape[1])
