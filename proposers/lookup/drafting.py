"""Drafting by lookup: the continuations of earlier matches, merged to a prefix tree of believable nodes."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch

from vllm_specplug.budget.calibration import LOGIT_LIMIT, OnlineLogistic, Reliability, log_ratio, sigmoid
from vllm_specplug.core.pool import NEVER, DraftPool
from vllm_specplug.core.pruning import rerank_draft
from vllm_specplug.proposer import DraftContext
from vllm_specplug.proposers.lookup.index import BREAK, RequestIndex, TrafficIndex, match_lengths
from vllm_specplug.proposers.lookup.options import LookupOptions
from vllm_specplug.types import PADDING, Draft
from vllm_specplug.utils.compiled import compiled

logger = logging.getLogger("vllm_specplug")

#: Chains by the last tokens: the long one finds good matches where the short one drowns in frequent tokens.
LONG_ANCHOR = 3

#: Features of a node: see ``build_prefix_tree``.
FEATURES = ("one", "match", "share", "support", "age", "request")
NUM_FEATURES, REQUEST = len(FEATURES), FEATURES.index("request")

#: Models, by where the supporting matches are: the request itself, traffic, both.
SCOPES = ("own", "traffic", "both")

#: Log odds at the start: logistic fit to 78,000 nodes (51% accepted) drafted along 400 answers of SmolLM2-135M-Instruct
#: to training prompts; what a server sees takes over within some hundred nodes.
START = {
    "own": (-0.86, 0.72, 0.86, 0.41, -0.54, 0.59),
    "traffic": (-2.02, 0.49, 1.01, -0.24, 0.06, 0.49),
    "both": (-0.80, 0.72, 0.69, -0.01, 0.03, 0.26),
}


@dataclass(frozen=True)
class Matches:
    """Continuations of matches, best first: longest match, then own before traffic, then newest.

    Attributes:
        continuations: int32 ``[num_reqs, num_matches, draft_depth]``; ``BREAK`` behind the end of what is known, and
            where there is no match.
        lengths: int64 ``[num_reqs, num_matches]``; matching tokens, 0 where there is no match.
        ages: int64 ``[num_reqs, num_matches]``; tokens since the match.
        own: bool ``[num_reqs, num_matches]``; in the request itself.
    """

    continuations: np.ndarray
    lengths: np.ndarray
    ages: np.ndarray
    own: np.ndarray


@dataclass(frozen=True)
class PrefixTree:
    """The continuations as a tree: place ``[r, d, k]`` is token ``d`` of continuation ``k``.

    Attributes:
        token_ids: int64 ``[num_reqs, draft_depth, num_matches]``.
        leaders: int64, same shape; the first continuation with the same tokens up to here, which stands for them all;
            0 where there is no token.
        nodes: bool, same shape; leaders of existing tokens: the nodes of the tree.
        features: float64 ``[..., num_features]``; 0 where there is no node.
        models: int64, same shape as ``nodes``; index into ``SCOPES``; 0 where there is no node.
    """

    token_ids: np.ndarray
    leaders: np.ndarray
    nodes: np.ndarray
    features: np.ndarray
    models: np.ndarray


@dataclass(frozen=True)
class _Open:
    """The last proposal, until the next call tells what the target chose."""

    requests: dict[str, int]
    num_tokens: np.ndarray
    tree: PrefixTree
    log_odds: np.ndarray


class LookupProposer:
    """Drafts what followed earlier matches of the last tokens, and learns which matches can be trusted."""

    def __init__(self, options: LookupOptions):
        self.options = options
        self.calibration = OnlineLogistic(np.array([START[scope] for scope in SCOPES]))
        self.reliability = Reliability()
        self._index: RequestIndex | None = None  # its rows are as long as the host's: known with the first call
        self._traffic = TrafficIndex(options.kept_tokens, LONG_ANCHOR) if options.kept_tokens else None
        self._open: _Open | None = None
        #: By request: where its answer starts, and how its matches have done (accepted, expected), with decay.
        self._prompt_lens: OrderedDict[str, int] = OrderedDict()
        self._records: dict[str, tuple[float, float]] = {}

    def propose(self, context: DraftContext) -> Draft:
        """Draft one tree per request; a request without a believable match gets a root alone."""
        wanted = np.flatnonzero(context.wanted.numpy())
        request_ids = tuple(context.request_ids[request] for request in wanted)
        num_tokens = context.num_tokens.numpy()[wanted]
        rows = self._store(context, wanted, request_ids, num_tokens)
        self._learn(request_ids, rows, num_tokens)
        tree = build_prefix_tree(self._find(rows), self._request_features(request_ids))
        pool, log_odds = make_pool(tree, self.calibration.weights, wanted, len(context.request_ids))
        requests = {request_id: place for place, request_id in enumerate(request_ids)}
        self._open = _Open(requests, num_tokens, tree, log_odds)
        options = self.options
        return rerank_draft(pool, context.root_token_ids, options.num_speculative_tokens, options.node_floor)[0]

    def finish(self, request_ids: Collection[str]) -> None:
        """Keep the answers of ended requests for later ones."""
        for request_id in request_ids:
            prompt_len = self._prompt_lens.pop(request_id, None)
            self._records.pop(request_id, None)
            if self._index is None:
                continue
            tokens = self._index.stored(request_id)
            if tokens is not None and prompt_len is not None and self._traffic is not None:
                # The last prompt tokens give the answer's first ones something to match.
                self._traffic.add(tokens[max(prompt_len - self.options.max_match, 0) :])
            self._index.drop(request_id)

    def used_bytes(self) -> int:
        """Memory of the indices, in bytes."""
        return sum(index.used_bytes() for index in (self._index, self._traffic) if index is not None)

    # ---- one call

    def _store(
        self, context: DraftContext, wanted: np.ndarray, request_ids: tuple[str, ...], num_tokens: np.ndarray
    ) -> np.ndarray:
        token_ids = context.token_ids.numpy()
        if self._index is None:
            anchors = (LONG_ANCHOR, 1) if self.options.min_match < LONG_ANCHOR else (LONG_ANCHOR,)
            self._index = RequestIndex(token_ids.shape[1], anchors)
            logger.info(
                "vllm-specplug: lookup keeps %.1f MiB of finished requests' answers, and at most %.2f MiB per request",
                (self._traffic.used_bytes() if self._traffic is not None else 0) / 2**20,
                self._index.row_bytes() / 2**20,
            )
        for request_id, count in zip(request_ids, num_tokens.tolist(), strict=True):
            if request_id not in self._prompt_lens:
                self._prompt_lens[request_id] = count - 1
                if len(self._prompt_lens) > RequestIndex.MAX_ROWS:  # a host that never says what has ended
                    forgotten, _ = self._prompt_lens.popitem(last=False)
                    self._records.pop(forgotten, None)
        rows = self._index.rows_of(request_ids)
        self._index.extend(rows, token_ids, num_tokens, wanted)
        return rows

    def _find(self, rows: np.ndarray) -> Matches:
        index, traffic, options = self._index, self._traffic, self.options
        suffixes = index.suffixes(rows, max(options.max_match, LONG_ANCHOR))
        sources = [(index.tokens, chain, rows) for chain in index.chains]
        if traffic is not None:
            sources.append((traffic.tokens, traffic.chain, 0))
        places = [chain.follow(suffixes, rows, options.max_candidates) for _, chain, rows in sources]
        lengths = [match_lengths(source[0], found, suffixes) for source, found in zip(sources, places, strict=True)]
        return Matches(
            *_best_matches(
                np.concatenate(places, axis=1),
                np.concatenate(lengths, axis=1),
                len(index.chains) * options.max_candidates,
                index.tokens,
                index.start(rows) + index.lens[rows] - 1,
                sources[-1][0],
                traffic.cursor if traffic is not None else 0,
                (options.min_match, options.max_match, options.max_candidates, options.draft_depth),
            )
        )

    # ---- learning

    def _request_features(self, request_ids: tuple[str, ...]) -> np.ndarray:
        """How much better the matches of a request have done than expected, as log odds, float64 ``[num_reqs]``."""
        records = [self._records.get(request_id, (0.0, 0.0)) for request_id in request_ids]
        return np.array([log_ratio(accepted, expected) for accepted, expected in records])

    def _learn(self, request_ids: tuple[str, ...], rows: np.ndarray, num_tokens: np.ndarray) -> None:
        """Compare the last proposal with the tokens that the target has chosen since."""
        last = self._open
        if last is None:
            return
        now = [place for place, request_id in enumerate(request_ids) if request_id in last.requests]
        if not now:
            return
        then = [last.requests[request_ids[place]] for place in now]
        before = last.num_tokens[then]
        tree = last.tree
        owners, models, features, accepted, log_odds = _outcomes(
            (tree.token_ids, tree.nodes, tree.models, tree.features, last.log_odds),
            np.array(then),
            self._index.tokens,
            self._index.start(rows[now]) + before,
            num_tokens[now] - before,
        )
        self.reliability.add(sigmoid(log_odds), accepted)
        self.calibration.learn(models, features, accepted)
        sums = _record_sums(
            owners, models, features, accepted, log_odds, self.calibration.weights, LOGIT_LIMIT, len(now)
        )
        for place, (num_accepted, num_expected) in zip(now, sums.tolist(), strict=True):
            old_accepted, old_expected = self._records.get(request_ids[place], (0.0, 0.0))
            self._records[request_ids[place]] = (0.9 * old_accepted + num_accepted, 0.9 * old_expected + num_expected)


def build_prefix_tree(matches: Matches, request_features: np.ndarray) -> PrefixTree:
    """Merge continuations: equal tokens behind equal tokens are one node.

    Args:
        matches: the continuations.
        request_features: float64 ``[num_reqs]``.
    """
    return PrefixTree(
        *_prefix_tree(matches.continuations, matches.lengths, matches.ages, matches.own, request_features)
    )


def make_pool(
    tree: PrefixTree, weights: np.ndarray, requests: np.ndarray, num_reqs: int
) -> tuple[DraftPool, np.ndarray]:
    """Value the nodes of a prefix tree.

    Args:
        tree: of some of the requests.
        weights: float64 ``[num_models, num_features]``; of ``OnlineLogistic``.
        requests: int64; the row of the pool for each of the tree's requests.
        num_reqs: rows of the pool; those of no request of the tree are empty.

    Returns:
        The pool, of ``draft_depth * num_matches`` columns, and the log odds of each place, like ``tree.nodes``; 0 where
        there is no node.
    """
    *pool, log_odds = _pool(
        tree.token_ids, tree.leaders, tree.nodes, tree.features, tree.models, weights, LOGIT_LIMIT, requests, num_reqs
    )
    return DraftPool(*map(torch.from_numpy, pool), size=pool[0].shape[1]), log_odds


# ---- loops


@compiled
def _best_matches(
    places: np.ndarray,
    lengths: np.ndarray,
    num_own: int,
    tokens: np.ndarray,
    ends: np.ndarray,
    traffic: np.ndarray,
    cursor: int,
    options: tuple[int, int, int, int],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The longest matches, ties in the order given, and what follows them.

    Args:
        places: int64 ``[num_reqs, num_places]``; of them ``num_own`` in ``tokens``, where the last known token of a
            request is at ``ends``; the others in ``traffic``, written last at ``cursor``.
        lengths: int64, like ``places``; matching tokens of each.
        options: ``min_match``, ``max_match``, ``max_candidates`` and ``draft_depth``.

    Returns:
        The fields of ``Matches``.
    """
    num_reqs, num_places = places.shape
    min_match, max_match, count, depth = options
    continuations = np.full((num_reqs, count, depth), BREAK, dtype=np.int32)
    best = np.zeros((num_reqs, count), dtype=np.int64)
    ages = np.ones((num_reqs, count), dtype=np.int64)
    own = np.zeros((num_reqs, count), dtype=np.bool_)
    chosen = np.empty(count, dtype=np.int64)
    for request in range(num_reqs):
        end, num_chosen = ends[request], 0
        for k in range(num_places):
            place, length = places[request, k], lengths[request, k]
            # What the long chain finds comes first; the short one need not find it again.
            if k < num_own and (place >= end or (k >= count and length >= LONG_ANCHOR)):
                continue
            length = min(length, max_match)
            if place == 0 or length < min_match or (num_chosen == count and length <= best[request, count - 1]):
                continue
            rank = min(num_chosen, count - 1)
            while rank > 0 and best[request, rank - 1] < length:
                best[request, rank], chosen[rank] = best[request, rank - 1], chosen[rank - 1]
                rank -= 1
            best[request, rank], chosen[rank] = length, k
            num_chosen = min(num_chosen + 1, count)
        for rank in range(num_chosen):
            place = places[request, chosen[rank]]
            own[request, rank] = chosen[rank] < num_own
            if own[request, rank]:
                age = end - place
                for d in range(depth):  # a repetition goes on: behind the end of what is known it starts over
                    continuations[request, rank, d] = tokens[place + 1 + d % age]
            else:
                age = (cursor - place) % (len(traffic) - 1)
                for d in range(min(depth, len(traffic) - 1 - place)):
                    continuations[request, rank, d] = traffic[place + 1 + d]
            ages[request, rank] = age
    return continuations, best, ages, own


@compiled
def _prefix_tree(
    continuations: np.ndarray, lengths: np.ndarray, ages: np.ndarray, own: np.ndarray, request_features: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The fields of ``PrefixTree``, see ``build_prefix_tree``."""
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
            # A match one token longer weighs twice as much; the best weighs 1.
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
                    # Once its ancestors are accepted, they are part of the match.
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
    features: np.ndarray,
    models: np.ndarray,
    weights: np.ndarray,
    limit: float,
    requests: np.ndarray,
    num_reqs: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Token ids, parents, log values and depths of a ``DraftPool``, and log odds, see ``make_pool``."""
    _, depth, count = nodes.shape
    shape = (num_reqs, depth * count)
    pool_token_ids = np.full(shape, PADDING, dtype=np.int64)
    pool_parents = np.full(shape, PADDING, dtype=np.int64)
    pool_log_values = np.full(shape, NEVER, dtype=np.float32)
    pool_depths = np.zeros(shape, dtype=np.int64)
    log_odds = np.zeros(nodes.shape)
    log_values = np.zeros((depth, count))
    for place, request in enumerate(requests):
        for d in range(depth):
            for k in range(count):
                if not nodes[place, d, k]:
                    continue
                logit = 0.0
                for feature in range(features.shape[3]):
                    logit += features[place, d, k, feature] * weights[models[place, d, k], feature]
                log_odds[place, d, k] = logit
                value = -math.log(1 + math.exp(min(max(-logit, -limit), limit)))
                parent = leaders[place, d - 1, k] if d else PADDING
                if d:
                    value += log_values[d - 1, parent]
                    parent += (d - 1) * count
                log_values[d, k] = value
                column = d * count + k
                pool_token_ids[request, column] = token_ids[place, d, k]
                pool_parents[request, column] = parent
                pool_log_values[request, column] = value
                pool_depths[request, column] = d + 1
    return pool_token_ids, pool_parents, pool_log_values, pool_depths, log_odds


@compiled
def _outcomes(
    tree: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    requests: np.ndarray,
    tokens: np.ndarray,
    starts: np.ndarray,
    num_known: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The nodes that the target's choice says something of: their parent was right and the next token is known.

    Args:
        tree: token ids, nodes, models and features of a ``PrefixTree``, and the log odds of its places.
        requests: int64 ``[num_reqs]``; which of the tree's.
        tokens: int32; the store.
        starts: int64 ``[num_reqs]``; place of the first token behind the root.
        num_known: int64 ``[num_reqs]``; tokens known from there on.

    Returns:
        For each such node, of a request from top to bottom: int64 index into ``requests``, int64 model, float64
        features ``[num_features]``, whether it was accepted, float64 log odds.
    """
    token_ids, nodes, all_models, all_features, all_log_odds = tree
    _, depth, count = nodes.shape
    most = 0
    for known in num_known:
        most += count * min(max(known, 0), depth)
    owners, models = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int64)
    features, log_odds = np.empty((most, all_features.shape[3])), np.empty(most)
    accepted = np.empty(most, dtype=np.bool_)
    right = np.empty(count, dtype=np.bool_)
    found = 0
    for owner, request in enumerate(requests):
        right[:] = True
        for d in range(min(num_known[owner], depth)):
            for k in range(count):
                if not right[k]:
                    continue
                right[k] = token_ids[request, d, k] == tokens[starts[owner] + d]
                if nodes[request, d, k]:
                    owners[found], models[found] = owner, all_models[request, d, k]
                    features[found], log_odds[found] = all_features[request, d, k], all_log_odds[request, d, k]
                    accepted[found] = right[k]
                    found += 1
    return owners[:found], models[:found], features[:found], accepted[:found], log_odds[:found]


@compiled
def _record_sums(
    owners: np.ndarray,
    models: np.ndarray,
    features: np.ndarray,
    accepted: np.ndarray,
    log_odds: np.ndarray,
    weights: np.ndarray,
    limit: float,
    num_reqs: int,
) -> np.ndarray:
    """Nodes accepted and expected to be, by request: float64 ``[num_reqs, 2]``."""
    sums = np.zeros((num_reqs, 2))
    for node, owner in enumerate(owners):
        # What was expected of any request: what is known of this one left out.
        logit = log_odds[node] - features[node, REQUEST] * weights[models[node], REQUEST]
        sums[owner, 0] += accepted[node]
        sums[owner, 1] += 1 / (1 + math.exp(min(max(-logit, -limit), limit)))
    return sums
