"""What the target's tokens say of the last draft: acceptance is learned for the model and for each request."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_specplug.budget.calibration import LOGIT_LIMIT, OnlineLogistic, Reliability, log_ratio
from vllm_specplug.budget.selector import ScoredDraft
from vllm_specplug.utils.compiled import compiled

#: Weights of the features before anything was learned, see ``selector.node_values``: the drafter's probabilities are
#: taken as they are, and half of a request's record counts.  Chosen by hand; not swept.
FIRST_WEIGHTS = [0.0, 1.0, 0.0, 0.5]
#: Outcomes after which an old one counts 1/e in the calibration.  Chosen by hand; not swept.
CALIBRATION_MEMORY = 3000.0
#: Factor on a request's record at each step that adds to it (a memory of 10 steps).  Chosen by hand; not swept.
RECORD_DECAY = 0.9
#: Batches of so many requests are learned from at every step, twice as many at every second step, and so on, up to
#: every fourth.  So the decision takes a third of the time that it took without (commit 07cdc05); the goal is 1% of a
#: step at 32 requests (docs/measurements.md, *Time of the budget's decision*).
LEARN_REQUESTS, LEARN_SELDOM = 8, 4
#: Most requests with a record: vLLM reports requests that have ended; this bounds the memory if it does not.
MAX_RECORDS = 4096


@dataclass(frozen=True)
class _LastDraft:
    """A draft of which the outcome is not known yet.

    Attributes:
        request_ids: of the batch.
        num_tokens: int ``[num_reqs]``; tokens that each request had.
        scored: the draft.
        arm: index of the arm that drafted.
    """

    request_ids: tuple[str, ...]
    num_tokens: np.ndarray
    scored: ScoredDraft
    arm: int


class Outcomes:
    """Learns from each draft, verified or not, once the target has chosen its tokens.

    Args:
        num_arms: arms, each with a calibration of its own.

    Attributes:
        calibration: the acceptance probability of a node, by its features.
        reliability: predicted against observed acceptance.
        num_steps: steps seen.
    """

    def __init__(self, num_arms: int):
        self.calibration = OnlineLogistic(np.tile(FIRST_WEIGHTS, (num_arms, 1)), memory=CALIBRATION_MEMORY)
        self.reliability = Reliability()
        self.num_steps = 0
        #: By request: accepted and expected nodes, with decay.
        self._records: dict[str, tuple[float, float]] = {}
        self._last: _LastDraft | None = None

    def records_of(self, request_ids: Sequence[str]) -> np.ndarray:
        """Return how much better each request's drafts did than expected, float64 ``[num_reqs]``, as log odds."""
        return np.array([log_ratio(*self._records.get(request_id, (0.0, 0.0))) for request_id in request_ids])

    def drafted(self, request_ids: Sequence[str], num_tokens: np.ndarray, scored: ScoredDraft, arm: int) -> None:
        """Keep a draft until ``learn``.

        Args:
            request_ids: of the batch.
            num_tokens: int ``[num_reqs]``; tokens that each request has, its root included.
            scored: the draft, before any node is left out.
            arm: index of the arm that drafted.
        """
        self._last = _LastDraft(tuple(request_ids), num_tokens.copy(), scored, arm)

    def learn(self, request_ids: Sequence[str], token_ids: np.ndarray, num_tokens: np.ndarray) -> float:
        """Compare the last draft with the tokens that the target has chosen since.

        Args:
            request_ids: of the batch now.
            token_ids: int ``[num_reqs, max_len]``; tokens of the requests.
            num_tokens: int ``[num_reqs]``; their numbers.

        Returns:
            The mean number of tokens that a request emitted; 0 if nothing was compared.
        """
        last, self._last = self._last, None
        self.num_steps += 1
        if last is None or self.num_steps % min(-(-len(request_ids) // LEARN_REQUESTS), LEARN_SELDOM):
            return 0.0
        now = {request_id: index for index, request_id in enumerate(request_ids)}
        features, predicted, accepted, sums, emitted = outcomes_of(
            last.scored.token_ids,
            last.scored.parents,
            last.scored.features,
            self.calibration.weights[last.arm],
            LOGIT_LIMIT,
            np.array([now.get(request_id, -1) for request_id in last.request_ids], dtype=np.int64),
            np.ascontiguousarray(last.num_tokens, dtype=np.int64),
            np.ascontiguousarray(token_ids, dtype=np.int32),
            np.ascontiguousarray(num_tokens, dtype=np.int64),
        )
        if len(accepted):
            self.reliability.add(predicted, accepted)
            self.calibration.learn(np.full(len(accepted), last.arm), features, accepted)
            self._add_to_records(last.request_ids, sums)
        return emitted

    def _add_to_records(self, request_ids: Sequence[str], sums: np.ndarray) -> None:
        for request_id, (num_accepted, num_expected, count) in zip(request_ids, sums.tolist(), strict=True):
            if count:
                old = self._records.get(request_id, (0.0, 0.0))
                self._records[request_id] = (
                    RECORD_DECAY * old[0] + num_accepted,
                    RECORD_DECAY * old[1] + num_expected,
                )
        while len(self._records) > MAX_RECORDS:
            del self._records[next(iter(self._records))]

    def finish(self, request_ids: Collection[str]) -> None:
        """Forget requests that have ended."""
        for request_id in request_ids:
            self._records.pop(request_id, None)


@compiled
def outcomes_of(
    drafted: np.ndarray,
    parents: np.ndarray,
    features: np.ndarray,
    weights: np.ndarray,
    limit: float,
    indices: np.ndarray,
    starts: np.ndarray,
    token_ids: np.ndarray,
    ends: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, float]:
    """Compare drafted nodes with the target's tokens: those whose parent was right, as deep as there are tokens.

    Args:
        drafted, parents: int64 ``[n, num_rows]``; parent-first.
        features: float64 ``[n, num_rows, 4]``; the last one is the request's record.
        weights: float64 ``[4]``.
        limit: largest absolute value of log odds.
        indices: int64 ``[n]``; batch index of each request now, -1 if it has left the batch.
        starts: int64 ``[n]``; tokens that each request had when it was drafted for.
        token_ids: int32 ``[num_reqs, max_len]``; tokens of the requests now.
        ends: int64 ``[num_reqs]``; numbers of tokens now.

    Returns:
        By compared node: features, predicted probability, whether it was right (bool).  By request, float64 ``[n, 3]``:
        nodes that were right, expected to be right without the record, compared.  Mean number of tokens emitted, or 0.
    """
    num_reqs, width = parents.shape
    found = np.empty((num_reqs * width, features.shape[2]))
    predicted, accepted = np.empty(len(found)), np.empty(len(found), np.bool_)
    sums, depth_of = np.zeros((num_reqs, 3)), np.empty(width, np.int64)
    count = emitted = requests = 0
    for request in range(num_reqs):
        index, start = indices[request], starts[request]
        length = ends[index] - start if index >= 0 else 0
        if length <= 0:
            continue
        emitted += length
        requests += 1
        depth_of[:] = -1
        depth_of[0] = 0  # of the rows that were right
        for row in range(1, width):
            parent = parents[request, row]
            depth = depth_of[parent] if parent >= 0 else -1
            if depth < 0 or depth == length:
                continue
            right = drafted[request, row] == token_ids[index, start + depth]
            if right:
                depth_of[row] = depth + 1
            one = features[request, row]
            others = one[0] * weights[0] + one[1] * weights[1] + one[2] * weights[2]
            logit = others + one[3] * weights[3]
            for feature in range(len(one)):  # not as a slice, see `pool._next_level`
                found[count, feature] = one[feature]
            predicted[count] = 1.0 / (1.0 + np.exp(min(max(-logit, -limit), limit)))
            accepted[count] = right
            sums[request, 0] += right
            sums[request, 1] += 1.0 / (1.0 + np.exp(min(max(-others, -limit), limit)))
            sums[request, 2] += 1.0
            count += 1
    return found[:count], predicted[:count], accepted[:count], sums, emitted / max(requests, 1)
