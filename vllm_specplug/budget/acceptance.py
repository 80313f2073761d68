"""How likely drafted nodes are accepted: of each node (CPU), and of a whole tree by its shape (GPU)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_specplug.budget.calibration import OnlineLogistic, log_odds_of, log_ratio, sigmoid
from vllm_specplug.budget.cost import FORGETTING, Filter
from vllm_specplug.budget.shapes import Shape
from vllm_specplug.types import Draft

#: Weights of a node's features before anything was learned: the drafter's probabilities are taken as they are, and half
#: of a request's record counts.
FIRST_WEIGHTS = [0.0, 1.0, 0.0, 0.5]
#: Factor on a request's record at each step that adds to it: a memory of ten steps.
RECORD_DECAY = 0.9


@dataclass(frozen=True)
class ScoredDraft:
    """The nodes of a draft with the probabilities that the target accepts them.

    Attributes:
        request_ids: of the batch.
        num_tokens: int ``[num_reqs]``; tokens that each request had.
        arm: index of the arm that drafted.
        token_ids, depths: int64 ``[num_reqs, num_rows]``.
        ancestors: int64 ``[num_reqs, num_rows]``, one for each of 1, 2, 4, ... levels above: places in the flat arrays.
        features: float64 ``[num_reqs, num_rows, 4]``: 1, the drafter's log odds of the node given its parent, the
            logarithm of the depth, and the request's record.
        values: float64 ``[num_reqs, num_rows]``; probabilities of acceptance, 0 where there is no node.
    """

    request_ids: tuple[str, ...]
    num_tokens: np.ndarray
    arm: int
    token_ids: np.ndarray
    depths: np.ndarray
    ancestors: list[np.ndarray]
    features: np.ndarray
    values: np.ndarray


class NodeAcceptance:
    """Estimates the acceptance of nodes, and learns from each draft, verified or not.

    Args:
        num_arms: arms, each with a calibration of its own.

    Attributes:
        emitted: mean number of tokens that a request emits in a step.
    """

    def __init__(self, num_arms: int):
        self._calibration = OnlineLogistic(np.tile(FIRST_WEIGHTS, (num_arms, 1)), memory=3000.0)
        self.emitted = 1.5
        #: By request: accepted and expected nodes, with decay.
        self._records: dict[str, tuple[float, float]] = {}
        self._last: ScoredDraft | None = None

    def score(
        self, draft: Draft, request_ids: Sequence[str], num_tokens: np.ndarray, wanted: np.ndarray, arm: int
    ) -> ScoredDraft:
        """Estimate the nodes of a draft, and keep them until ``learn``; the arguments are those of ``Budget.select``.

        Args:
            arm: index of the arm that drafted.
        """
        tree, depths = draft.tree, draft.tree.depths.numpy()
        is_node = np.arange(depths.shape[1]) < tree.num_rows.numpy()[:, None]
        is_node[:, 0] = False
        ancestors = _ancestors(np.where(is_node, tree.parents.numpy(), 0), int(depths.max(initial=0)))
        log_values = np.where(is_node, draft.log_values.numpy(), 0.0)
        log_values = np.maximum(log_values.astype(np.float64), -1e9)  # below this, differences are no numbers
        features = np.ones((*depths.shape, 4))
        features[..., 1] = log_odds_of(np.minimum(log_values - log_values.take(ancestors[0]), 0.0))
        features[..., 2] = np.log2(np.maximum(depths, 1))
        features[..., 3] = [[log_ratio(*self._records.get(request_id, (0.0, 0.0)))] for request_id in request_ids]
        sums = np.where(is_node, np.log(sigmoid(features @ self._calibration.weights[arm])), 0.0)
        for above in ancestors:  # after each pass a sum reaches twice as many levels up
            sums += sums.take(above)
        values = np.where(is_node & wanted[:, None], np.exp(sums), 0.0)
        token_ids = tree.token_ids.numpy()
        self._last = ScoredDraft(
            tuple(request_ids), num_tokens.copy(), arm, token_ids, depths, ancestors, features, values
        )
        return self._last

    def learn(self, request_ids: Sequence[str], token_ids: np.ndarray, num_tokens: np.ndarray) -> None:
        """Compare the last draft, verified or not, with the tokens that the target has chosen since.

        Args:
            request_ids: of the batch now.
            token_ids: int ``[num_reqs, max_len]``; tokens of the requests.
            num_tokens: int ``[num_reqs]``; their numbers.
        """
        last, self._last = self._last, None
        if last is None:
            return
        places = {request_id: place for place, request_id in enumerate(request_ids)}
        now = np.array([places.get(request_id, -1) for request_id in last.request_ids])
        if now.max(initial=-1) < 0:
            return
        emitted = np.where(now < 0, 0, num_tokens[now] - last.num_tokens)
        self.emitted += 0.05 * (float(emitted[now >= 0].mean()) - self.emitted)
        has_outcome, accepted = _outcomes(last, token_ids, now, emitted)
        features, weights = last.features[has_outcome], self._calibration.weights[last.arm]
        logits = features @ weights
        self._calibration.learn(np.full(len(features), last.arm), features, accepted[has_outcome])
        # A record is relative to the expectation without it.
        expected = np.zeros(has_outcome.shape)
        expected[has_outcome] = sigmoid(logits - features[:, 3] * weights[3])
        outcomes = zip(last.request_ids, accepted.sum(axis=1).tolist(), expected.sum(axis=1).tolist(), strict=True)
        for request_id, right, hoped in outcomes:
            if request_id in places:
                before = self._records.get(request_id, (0.0, 0.0))
                self._records[request_id] = RECORD_DECAY * before[0] + right, RECORD_DECAY * before[1] + hoped

    def finish(self, request_ids: Collection[str]) -> None:
        """Forget requests that have ended."""
        for request_id in request_ids:
            self._records.pop(request_id, None)


def _ancestors(parents: np.ndarray, max_depth: int) -> list[np.ndarray]:
    """Return ``ScoredDraft.ancestors`` of parents int64 ``[num_reqs, num_rows]``, 0 for the root and padding."""
    num_reqs, num_rows = parents.shape
    found = [parents + np.arange(0, num_reqs * num_rows, max(num_rows, 1))[:, None]]
    while 2 ** len(found) <= max_depth:
        found.append(found[-1].take(found[-1]))
    return found


def _outcomes(
    last: ScoredDraft, token_ids: np.ndarray, now: np.ndarray, emitted: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the nodes whose parent was right, as deep as there are tokens, and of these the right ones.

    Both are bool ``[num_reqs, num_rows]``.

    Args:
        last: the draft.
        token_ids: int ``[batch, max_len]``; tokens of the batch now.
        now: int ``[num_reqs]``; place of each request of the draft in the batch; any if it has gone.
        emitted: int ``[num_reqs]``; tokens since the draft; 0 if the request has gone.
    """
    is_known = (last.depths > 0) & (last.depths <= emitted[:, None])
    places = np.minimum(last.num_tokens[:, None] + last.depths - 1, token_ids.shape[1] - 1)
    right = (token_ids[now[:, None], places] == last.token_ids) & is_known
    right[:, 0] = True
    for above in last.ancestors:
        right &= right.take(above)
    has_outcome = is_known & right.take(last.ancestors[0])
    return has_outcome, right & has_outcome


class ShapeAcceptance:
    """Estimates accepted nodes per request by the nodes of a shape; a larger shape is never worth less.

    Args:
        shapes: with drafts, smallest first.
    """

    #: Relative uncertainty of the start: of all shapes together, and of each by itself.
    COMMON, OWN = 1.0, 0.3
    #: Accepted nodes per doubling of the rows at the start: a tree of 60 nodes then has 3, about what EAGLE-2 reports
    #: for dialogue (Li et al. 2024, table 1).
    PER_DOUBLING = 0.5
    #: Most steps between two outcomes that count as forgetting: by more, one trial would overrule all that was known.
    MOST_ELAPSED = 16

    def __init__(self, shapes: Sequence[Shape]):
        self._nodes = [shape.nodes for shape in shapes]
        bits = np.log2(np.array(self._nodes) + 1)
        expected = np.minimum(self.PER_DOUBLING * bits, [0.9 * one.depth for one in shapes])
        likeness = np.exp(-np.abs(bits[:, None] - bits) / 2)
        covariance = np.outer(expected, expected) * (self.COMMON**2 + self.OWN**2 * likeness)
        self._filter = Filter(expected, covariance, FORGETTING)
        self._accepted = rising(expected, self._filter.variances)

    def at(self, nodes: int) -> float:
        """Return the accepted nodes to expect of a request."""
        return float(self._accepted[self._nodes.index(nodes)])

    def learn(self, nodes: int, num_accepted: float, num_reqs: int, elapsed: int = 1) -> None:
        """Add a step in which ``num_reqs`` requests had a shape, and ``num_accepted`` nodes of all were accepted.

        ``elapsed``: steps since the last one with drafts; older knowledge is forgotten as fast.
        """
        if nodes not in self._nodes or not num_reqs:
            return
        features, expected = np.zeros(len(self._nodes)), self.at(nodes)
        features[self._nodes.index(nodes)] = 1.0
        # Accepted nodes of one request spread like tries until the first failure.
        noise = ((expected + 0.05) * (1 + expected) / num_reqs) ** 0.5
        self._filter.observe(features, num_accepted / num_reqs, noise, min(elapsed, self.MOST_ELAPSED))
        self._accepted = rising(np.maximum(self._filter.weights, 0.0), self._filter.variances)


def rising(values: np.ndarray, variances: np.ndarray) -> np.ndarray:
    """Return the values that never fall and are closest to the given ones: the certain ones change least.

    Isotonic regression; values that fall are pooled with their neighbours.
    """
    pools: list[tuple[float, float, int]] = []  # value, weight, number of values
    for value, weight in zip(values.tolist(), (1 / variances).tolist(), strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (first, of_first, count), (second, of_second, more) = pools[-2:]
            total = of_first + of_second
            pools[-2:] = [((first * of_first + second * of_second) / total, total, count + more)]
    return np.repeat([value for value, _, _ in pools], [count for _, _, count in pools])
