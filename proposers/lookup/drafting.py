"""The lookup proposer: drafts continuations of earlier matches and learns which matches are reliable."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from vllm_specplug.budget.calibration import log_ratio, sigmoid
from vllm_specplug.core.outcomes import common_requests
from vllm_specplug.cpu.kernels.tree_ops import rerank_draft
from vllm_specplug.proposer import DraftContext
from vllm_specplug.proposers.lookup.index import RequestIndex, TrafficIndex
from vllm_specplug.proposers.lookup.learning import MatchLearner, ValuedMatches
from vllm_specplug.proposers.lookup.matches import LONG_ANCHOR, find_matches
from vllm_specplug.proposers.lookup.options import LookupOptions
from vllm_specplug.proposers.lookup.prefix_tree import REQUEST
from vllm_specplug.types import Draft

logger = logging.getLogger("vllm_specplug")


@dataclass(frozen=True)
class _LastDraft:
    """The last draft, kept until the next call shows which tokens the target chose.

    Attributes:
        request_ids: requests that were drafted for.
        num_tokens: int64 ``[num_reqs]``; tokens that each had.
        valued: their matches.
    """

    request_ids: tuple[str, ...]
    num_tokens: np.ndarray
    valued: ValuedMatches


class LookupProposer(MatchLearner):
    """Drafts the continuations of earlier matches of the last tokens; learns while serving which are accepted."""

    def __init__(self, options: LookupOptions):
        super().__init__()
        self.options = options
        self._index: RequestIndex | None = None  # its slots are as long as vLLM's rows: known at the first call
        self._traffic = TrafficIndex(options.kept_tokens, LONG_ANCHOR) if options.kept_tokens else None
        self._last_draft: _LastDraft | None = None
        #: By request: tokens before its answer, and its namespace.
        self._answers: OrderedDict[str, tuple[int, int]] = OrderedDict()
        #: By request: accepted and expected nodes, with decay.
        self._records: dict[str, tuple[float, float]] = {}

    def propose(self, context: DraftContext) -> Draft:
        """Draft one tree per request; a request without a match above ``min_node_value`` gets a root alone."""
        wanted = np.flatnonzero(context.wanted.numpy())
        request_ids = tuple(context.request_ids[request] for request in wanted)
        num_tokens, token_ids = context.num_tokens.numpy()[wanted], context.token_ids.numpy()
        prompt_lens, namespaces = context.prompt_lens.numpy()[wanted], context.namespaces.numpy()[wanted]
        self._note_answers(request_ids, prompt_lens, namespaces)
        index, slots = self._store(request_ids, num_tokens, token_ids, wanted)
        self._learn(request_ids, num_tokens, prompt_lens, token_ids, wanted)
        matches = find_matches(index, self._traffic, slots, namespaces, self.options)
        valued = self.value(matches, self._request_features(request_ids), wanted, len(context.request_ids))
        self._last_draft = _LastDraft(request_ids, num_tokens, valued)
        options = self.options
        return rerank_draft(valued.pool, context.root_token_ids, options.num_speculative_tokens, options.node_floor)[0]

    def finish(self, request_ids: Collection[str]) -> None:
        """Keep the answers of ended requests for later ones."""
        for request_id in request_ids:
            self._keep_answer(request_id)
            self._records.pop(request_id, None)
            if self._index is not None:
                self._index.drop(request_id)

    def used_bytes(self) -> int:
        """Return the memory of the indices, in bytes."""
        return sum(index.used_bytes() for index in (self._index, self._traffic) if index is not None)

    def _note_answers(self, request_ids: tuple[str, ...], prompt_lens: np.ndarray, namespaces: np.ndarray) -> None:
        """Note where the answers begin; where that has changed, keep the answer of a session's last turn."""
        for request_id, *answer in zip(request_ids, prompt_lens.tolist(), namespaces.tolist(), strict=True):
            if self._answers.get(request_id) != tuple(answer):
                self._keep_answer(request_id)
                self._answers[request_id] = tuple(answer)
            if len(self._answers) > RequestIndex.MAX_SLOTS:  # the caller never reports ended requests
                forgotten, _ = self._answers.popitem(last=False)
                self._records.pop(forgotten, None)

    def _keep_answer(self, request_id: str) -> None:
        """Keep a request's stored answer for later requests of its namespace.  No token of its prompt is kept."""
        answer = self._answers.pop(request_id, None)
        tokens = None if self._index is None else self._index.stored(request_id)
        if answer is not None and tokens is not None and self._traffic is not None:
            prompt_len, namespace = answer
            self._traffic.add(tokens[prompt_len:], namespace)

    def _store(
        self, request_ids: tuple[str, ...], num_tokens: np.ndarray, token_ids: np.ndarray, rows: np.ndarray
    ) -> tuple[RequestIndex, np.ndarray]:
        """Store the new tokens of requests; ``rows`` are theirs in ``token_ids``.  Return the index and their slots."""
        if self._index is None:
            anchors = (LONG_ANCHOR, 1) if self.options.min_match < LONG_ANCHOR else (LONG_ANCHOR,)
            self._index = RequestIndex(token_ids.shape[1], anchors)
            logger.info(
                "vllm-specplug: lookup uses %.1f MiB for finished requests' answers, and at most %.2f MiB per request",
                (self._traffic.used_bytes() if self._traffic is not None else 0) / 2**20,
                self._index.slot_bytes() / 2**20,
            )
        slots = self._index.slots_of(request_ids)
        self._index.extend(slots, token_ids, num_tokens, rows)
        return self._index, slots

    def _request_features(self, request_ids: tuple[str, ...]) -> np.ndarray:
        """Return the feature "request": log of accepted over expected nodes, float64 ``[num_reqs]``."""
        records = [self._records.get(request_id, (0.0, 0.0)) for request_id in request_ids]
        return np.array([log_ratio(accepted, expected) for accepted, expected in records])

    def _learn(
        self,
        request_ids: tuple[str, ...],
        num_tokens: np.ndarray,
        prompt_lens: np.ndarray,
        token_ids: np.ndarray,
        rows: np.ndarray,
    ) -> None:
        """Compare the last draft with the tokens that the target has chosen since.

        Args:
            request_ids, num_tokens, token_ids, rows: as in ``_store``.
            prompt_lens: int64 ``[num_reqs]``; tokens before each answer.
        """
        last = self._last_draft
        if last is None:
            return
        now, then = common_requests(request_ids, last.request_ids)
        same_answer = last.num_tokens[then] > prompt_lens[now]  # else an input follows the draft
        now, then = now[same_answer], then[same_answer]
        if not len(now):
            return
        nodes, owners, accepted = self.learn(
            last.valued, then, token_ids, rows[now], last.num_tokens[then], num_tokens[now]
        )
        models, features, log_odds = last.valued.of_nodes(nodes)
        own_record = features[:, REQUEST] * self.calibration.weights[models, REQUEST]
        sums = _record_sums(owners, accepted, log_odds, own_record, len(now))
        for index, (num_accepted, num_expected) in zip(now.tolist(), sums.tolist(), strict=True):
            old_accepted, old_expected = self._records.get(request_ids[index], (0.0, 0.0))
            self._records[request_ids[index]] = (0.9 * old_accepted + num_accepted, 0.9 * old_expected + num_expected)


def _record_sums(
    owners: np.ndarray, accepted: np.ndarray, log_odds: np.ndarray, own_record: np.ndarray, num_reqs: int
) -> np.ndarray:
    """Sum accepted and expected nodes by request (``owners``): float64 ``[num_reqs, 2]``."""
    # The record compares a request with all requests: the prediction must not use the request's own record.
    expected = sigmoid(log_odds - own_record)
    return np.stack([np.bincount(owners, weights, num_reqs) for weights in (accepted, expected)], axis=1)
