"""Which of the drafted nodes are verified: those whose value is worth the seconds that they add to the step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vllm_specplug.budget.calibration import LOGIT_LIMIT
from vllm_specplug.budget.costs import CostModel
from vllm_specplug.core.pruning import prune
from vllm_specplug.types import Draft
from vllm_specplug.utils.compiled import compiled


@dataclass(frozen=True)
class ScoredDraft:
    """The nodes of a draft as arrays on the CPU, with their values.

    Attributes:
        token_ids, parents, depths: int64 ``[num_reqs, num_rows]``.
        features: float64 ``[num_reqs, num_rows, 4]``; see ``node_values``.
        nodes: bool ``[num_reqs, num_rows]``; nodes of requests that decode in the next step.
        values: float64 ``[num_reqs, num_rows]``; 0 where there is no such node.
    """

    token_ids: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    features: np.ndarray
    nodes: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, draft: Draft, wanted: np.ndarray, records: np.ndarray, weights: np.ndarray) -> ScoredDraft:
        """Compute the values of a draft's nodes.

        Args:
            draft: of all requests.
            wanted: bool ``[num_reqs]``; requests that decode in the next step.
            records: float64 ``[num_reqs]``; of the requests, see ``calibration.log_ratio``.
            weights: float64 ``[4]``; of the calibration.
        """
        tree = draft.tree
        token_ids, parents, depths, num_rows, log_values = (
            np.ascontiguousarray(values.numpy())
            for values in (tree.token_ids, tree.parents, tree.depths, tree.num_rows, draft.log_values)
        )
        wanted = np.ascontiguousarray(wanted)
        scored = node_values(log_values, parents, depths, num_rows, wanted, records, weights, LOGIT_LIMIT)
        return cls(token_ids, parents, depths, *scored)


@dataclass(frozen=True)
class Selection:
    """The nodes to verify.

    Attributes:
        keep: bool ``[num_reqs, num_rows]``.
        num_nodes: their number.
        value: their summed value, in expected accepted tokens.
        seconds: that they add to the step.
    """

    keep: np.ndarray
    num_nodes: int
    value: float
    seconds: float

    @classmethod
    def of(cls, scored: ScoredDraft, costs: CostModel, num_reqs: int, rate: float, max_rows: int) -> Selection:
        """Choose nodes over the whole batch.

        Args:
            scored: the draft.
            costs: of the parts of a step.
            num_reqs: requests that decode in the next step.
            rate: tokens that a second is worth.
            max_rows: most rows of the step.
        """
        verify = costs.verification(num_reqs)
        for_trees = max(costs["tree"].at(num_reqs) - costs["sample"].at(num_reqs), 0.0)
        most = min(max_rows - num_reqs, len(verify) - 1)
        return cls(*keep_best(scored.values, scored.nodes, verify, for_trees, rate, most))

    def apply(self, draft: Draft, scored: ScoredDraft) -> Draft:
        """Return the draft with the selected nodes only."""
        return draft if self.num_nodes == scored.nodes.sum() else prune(draft, torch.from_numpy(self.keep))


@compiled
def node_values(
    log_values: np.ndarray,
    parents: np.ndarray,
    depths: np.ndarray,
    num_rows: np.ndarray,
    wanted: np.ndarray,
    records: np.ndarray,
    weights: np.ndarray,
    limit: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the acceptance probabilities of the nodes of trees, parent-first.

    Args:
        log_values: float32 ``[num_reqs, num_rows]``; logarithms of the values that the drafter estimates.
        parents, depths: int64 ``[num_reqs, num_rows]``.
        num_rows: int64 ``[num_reqs]``.
        wanted: bool ``[num_reqs]``; requests whose nodes count.
        records: float64 ``[num_reqs]``; see ``calibration.log_ratio``.
        weights: float64 ``[4]``; of the features.
        limit: largest absolute value of log odds.

    Returns:
        float64 ``[num_reqs, num_rows, 4]``: the features, which are 1, the drafter's log odds of the node given its
        parent, the logarithm of the depth, and the request's record; bool ``[num_reqs, num_rows]``: true for the nodes
        that count; float64 ``[num_reqs, num_rows]``: their values, 0 elsewhere.
    """
    num_reqs, width = parents.shape
    features = np.zeros((num_reqs, width, 4))
    nodes = np.zeros((num_reqs, width), dtype=np.bool_)
    values = np.zeros((num_reqs, width))
    for request in range(num_reqs):
        for row in range(1, num_rows[request]):
            parent = parents[request, row]
            edge = np.float64(log_values[request, row]) - np.float64(log_values[request, parent])
            if not edge < 0.0:  # NaN too
                edge = 0.0
            odds = edge - np.log(-np.expm1(edge)) if edge < 0.0 else limit
            one = features[request, row]
            one[0] = 1.0
            one[1] = min(max(odds, -limit), limit)
            one[2] = np.log2(max(np.float64(depths[request, row]), 1.0))
            one[3] = records[request]
            logit = one[0] * weights[0] + one[1] * weights[1] + one[2] * weights[2] + one[3] * weights[3]
            chance = 1.0 / (1.0 + np.exp(min(max(-logit, -limit), limit)))
            above = values[request, parent] if parent > 0 else 1.0
            values[request, row] = above * chance
            nodes[request, row] = wanted[request]
        if not wanted[request]:
            values[request] = 0.0
    return features, nodes, values


@compiled
def keep_best(
    values: np.ndarray, nodes: np.ndarray, verify: np.ndarray, for_trees: float, rate: float, most: int
) -> tuple[np.ndarray, int, float, float]:
    """Choose the number of best nodes with the largest value beyond their cost; of equal nodes the first are taken.

    Args:
        values: float64 ``[num_reqs, num_rows]``; a parent's is at least its child's.
        nodes: bool ``[num_reqs, num_rows]``; nodes to choose from.
        verify: float64 ``[n]``; seconds of the target's forward by number of nodes.
        for_trees: additional seconds if there is any node.
        rate: tokens that a second is worth.
        most: largest number of nodes.

    Returns:
        bool ``[num_reqs, num_rows]``: the nodes chosen; their number, their summed value, their seconds.
    """
    flat, is_candidate = values.ravel(), nodes.ravel()
    indices, keys, count = np.empty(len(flat), np.int64), np.empty(len(flat)), 0
    for index in range(len(flat)):
        if is_candidate[index]:
            indices[count], keys[count] = index, -flat[index]
            count += 1
    order = np.argsort(keys[:count], kind="mergesort")
    chosen, most_profit, chosen_gain, chosen_cost, gain = 0, 0.0, 0.0, 0.0, 0.0
    for number in range(1, min(count, most) + 1):
        gain -= keys[order[number - 1]]
        cost = verify[number] - verify[0] + for_trees
        if gain - rate * cost > most_profit:
            chosen, most_profit, chosen_gain, chosen_cost = number, gain - rate * cost, gain, cost
    keep = np.zeros(len(flat), np.bool_)
    for number in range(chosen):
        keep[indices[order[number]]] = True
    return keep.reshape(values.shape), chosen, chosen_gain, chosen_cost
