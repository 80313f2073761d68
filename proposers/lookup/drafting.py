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
        #: By request: tokens before its answer; accepted and expected nodes, with decay.
        self._prompt_lens: OrderedDict[str, int] = OrderedDict()
        self._records: dict[str, tuple[float, float]] = {}

    def propose(self, context: DraftContext) -> Draft:
        """Draft one tree per request; a request without a match above ``min_node_value`` gets a root alone."""
        wanted = np.flatnonzero(context.wanted.numpy())
        request_ids = tuple(context.request_ids[request] for request in wanted)
        num_tokens, token_ids = context.num_tokens.numpy()[wanted], context.token_ids.numpy()
        index, slots = self._store(request_ids, num_tokens, token_ids, wanted)
        self._learn(request_ids, num_tokens, token_ids, wanted)
        matches = find_matches(index, self._traffic, slots, self.options)
        valued = self.value(matches, self._request_features(request_ids), wanted, len(context.request_ids))
        self._last_draft = _LastDraft(request_ids, num_tokens, valued)
        options = self.options
        return rerank_draft(valued.pool, context.root_token_ids, options.num_speculative_tokens, options.node_floor)[0]

    def finish(self, request_ids: Collection[str]) -> None:
        """Keep the answers of ended requests for later ones."""
        for request_id in request_ids:
            prompt_len = self._prompt_lens.pop(request_id, None)
            self._records.pop(request_id, None)
            if self._index is None:
                continue
            tokens = self._index.stored(request_id)
            if tokens is not None and prompt_len is not None and self._traffic is not None:
                # A lookup at the start of an answer needs the last prompt tokens to match.
                self._traffic.add(tokens[max(prompt_len - self.options.max_match, 0) :])
            self._index.drop(request_id)

    def used_bytes(self) -> int:
        """Return the memory of the indices, in bytes."""
        return sum(index.used_bytes() for index in (self._index, self._traffic) if index is not None)

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
        for request_id, count in zip(request_ids, num_tokens.tolist(), strict=True):
            if request_id not in self._prompt_lens:
                self._prompt_lens[request_id] = count - 1
                if len(self._prompt_lens) > RequestIndex.MAX_SLOTS:  # the caller never reports ended requests
                    forgotten, _ = self._prompt_lens.popitem(last=False)
                    self._records.pop(forgotten, None)
        slots = self._index.slots_of(request_ids)
        self._index.extend(slots, token_ids, num_tokens, rows)
        return self._index, slots

    def _request_features(self, request_ids: tuple[str, ...]) -> np.ndarray:
        """Return the feature "request": log of accepted over expected nodes, float64 ``[num_reqs]``."""
        records = [self._records.get(request_id, (0.0, 0.0)) for request_id in request_ids]
        return np.array([log_ratio(accepted, expected) for accepted, expected in records])

    def _learn(
        self, request_ids: tuple[str, ...], num_tokens: np.ndarray, token_ids: np.ndarray, rows: np.ndarray
    ) -> None:
        """Compare the last draft with the tokens that the target has chosen since; arguments as in ``_store``."""
        last = self._last_draft
        if last is None:
            return
        now, then = common_requests(request_ids, last.request_ids)
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
