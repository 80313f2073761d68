"""Drafting by lookup: the continuations of earlier matches, merged to a prefix tree of believable nodes."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch

from vllm_specplug.calibration import OnlineLogistic, Reliability, sigmoid
from vllm_specplug.proposer import DraftContext
from vllm_specplug.proposers.lookup.index import BREAK, RequestIndex, TrafficIndex, match_lengths
from vllm_specplug.proposers.lookup.options import LookupOptions
from vllm_specplug.tree import NEVER, DraftPool, rerank_draft
from vllm_specplug.types import PADDING, Draft

logger = logging.getLogger("vllm_specplug")

#: Chains by the last tokens: the long one finds good matches where the short one drowns in frequent tokens.
LONG_ANCHOR = 3

#: Features of a node: see ``build_prefix_tree``.
FEATURES = ("one", "match", "share", "support", "age", "request")
REQUEST = FEATURES.index("request")

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
        continuations: int32 ``[num_reqs, num_matches, draft_depth]``; ``BREAK`` behind the end of what is known.
        lengths: int64 ``[num_reqs, num_matches]``; matching tokens, 0 where there is no match.
        ages: int64 ``[num_reqs, num_matches]``; tokens since the match.
        own: bool ``[num_matches]`` broadcast to ``[num_reqs, num_matches]``; in the request itself.
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
        leaders: int64, same shape; the first continuation with the same tokens up to here, which stands for them all.
        nodes: bool, same shape; leaders of existing tokens: the nodes of the tree.
        features: float64 ``[..., num_features]``.
        models: int64, same shape as ``nodes``; index into ``SCOPES``.
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
        log_odds = self.calibration.log_odds(tree.models, tree.features)
        requests = {request_id: place for place, request_id in enumerate(request_ids)}
        self._open = _Open(requests, num_tokens, tree, log_odds)
        return self._draft(context, wanted, tree, log_odds)

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
        self._index.extend(rows, token_ids[wanted] if len(wanted) < len(token_ids) else token_ids, num_tokens)
        return rows

    def _find(self, rows: np.ndarray) -> Matches:
        index, options, depth = self._index, self.options, self.options.draft_depth
        suffixes = index.suffixes(rows, max(options.max_match, LONG_ANCHOR))
        ends = (index.start(rows) + index.lens[rows] - 1)[:, None]
        found = []
        for chain in index.chains:
            places = chain.follow(suffixes[:, : chain.n], rows, options.max_candidates)
            lengths = match_lengths(index.tokens, places, suffixes)
            if chain.n < LONG_ANCHOR:  # the long chain has the others
                lengths *= lengths < LONG_ANCHOR
            lengths *= (places > 0) & (places < ends)
            ages = np.maximum(ends - places, 1)
            # A repetition goes on: behind the end of what is known it starts over.
            ahead = places[:, :, None] + 1 + np.arange(depth) % ages[:, :, None]
            continuations = index.tokens[np.minimum(ahead, len(index.tokens) - 1)]
            found.append((continuations, lengths, ages, np.ones_like(lengths, dtype=bool)))
        if self._traffic is not None:
            traffic = self._traffic
            places = traffic.chain.follow(suffixes[:, :LONG_ANCHOR], 0, options.max_candidates)
            lengths = match_lengths(traffic.tokens, places, suffixes) * (places > 0)
            ahead = np.minimum(places[:, :, None] + 1 + np.arange(depth), traffic.capacity)
            found.append((traffic.tokens[ahead], lengths, traffic.ages(places), np.zeros_like(lengths, dtype=bool)))
        continuations, lengths, ages, own = (np.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
        lengths = np.minimum(lengths, options.max_match)
        lengths *= lengths >= options.min_match
        order = np.argsort(-lengths, axis=1, kind="stable")[:, : options.max_candidates]
        return Matches(
            np.take_along_axis(continuations, order[:, :, None], axis=1),
            *(np.take_along_axis(values, order, axis=1) for values in (lengths, ages, own)),
        )

    def _draft(self, context: DraftContext, wanted: np.ndarray, tree: PrefixTree, log_odds: np.ndarray) -> Draft:
        # All continuations through a node share its probability, so that running sums along them agree.
        log_values = np.log(sigmoid(np.take_along_axis(log_odds, tree.leaders, axis=2))).cumsum(axis=1)
        log_values[~tree.nodes] = NEVER
        num_reqs, (_, depth, count) = len(context.request_ids), tree.nodes.shape
        parents = np.full(tree.nodes.shape, PADDING, dtype=np.int64)
        parents[:, 1:] = tree.leaders[:, :-1] + (np.arange(depth - 1) * count)[:, None]
        depths = np.broadcast_to(np.arange(1, depth + 1)[:, None], tree.nodes.shape).copy()

        def spread(values: np.ndarray, fill: float, dtype: torch.dtype) -> torch.Tensor:
            everyone = torch.full((num_reqs, depth * count), fill, dtype=dtype)
            everyone[torch.from_numpy(wanted)] = torch.from_numpy(values.reshape(-1, depth * count)).to(dtype)
            return everyone

        pool = DraftPool(
            token_ids=spread(tree.token_ids, PADDING, torch.int64),
            parents=spread(parents, PADDING, torch.int64),
            log_values=spread(log_values, NEVER, torch.float32),
            depths=spread(depths, 0, torch.int64),
            size=depth * count,
        )
        options = self.options
        return rerank_draft(pool, context.root_token_ids, options.num_speculative_tokens, options.node_floor)[0]

    # ---- learning

    def _request_features(self, request_ids: tuple[str, ...]) -> np.ndarray:
        """How much better the matches of a request have done than expected, as log odds, float64 ``[num_reqs]``."""
        records = np.array([self._records.get(request_id, (0.0, 0.0)) for request_id in request_ids]).reshape(-1, 2)
        return np.clip(np.log((records[:, 0] + 1) / (records[:, 1] + 1)), -2.0, 2.0)

    def _learn(self, request_ids: tuple[str, ...], rows: np.ndarray, num_tokens: np.ndarray) -> None:
        """Compare the last proposal with the tokens that the target has chosen since."""
        if self._open is None:
            return
        last = self._open.tree
        now = [place for place, request_id in enumerate(request_ids) if request_id in self._open.requests]
        if not now:
            return
        then = [self._open.requests[request_ids[place]] for place in now]
        depth = last.token_ids.shape[1]
        before = self._open.num_tokens[then]
        new = num_tokens[now] - before
        places = self._index.start(rows[now])[:, None] + before[:, None] + np.arange(depth)
        chosen = self._index.tokens[np.minimum(places, len(self._index.tokens) - 1)]
        known = (np.arange(depth) < new[:, None])[:, :, None]
        hits = (last.token_ids[then] == chosen[:, :, None]) & known
        right = np.logical_and.accumulate(hits, axis=1)
        # A node says something where its parent was right and the next token is known.
        reached = np.concatenate([np.ones_like(right[:, :1]), right[:, :-1]], axis=1) & known & last.nodes[then]
        owners, *places = np.nonzero(reached)
        where = (np.array(then)[owners], *places)
        models, features, accepted = last.models[where], last.features[where], right[reached]
        log_odds = self._open.log_odds[where]
        self.reliability.add(sigmoid(log_odds), accepted)
        self.calibration.learn(models, features, accepted)
        # What was expected of any request: what is known of this one left out.
        expected = sigmoid(log_odds - features[:, REQUEST] * self.calibration.weights[models, REQUEST])
        sums = [np.bincount(owners, values, minlength=len(now)).tolist() for values in (accepted, expected)]
        for place, num_accepted, num_expected in zip(now, *sums, strict=True):
            old_accepted, old_expected = self._records.get(request_ids[place], (0.0, 0.0))
            self._records[request_ids[place]] = (0.9 * old_accepted + num_accepted, 0.9 * old_expected + num_expected)


def build_prefix_tree(matches: Matches, request_features: np.ndarray) -> PrefixTree:
    """Merge continuations: equal tokens behind equal tokens are one node.

    Args:
        matches: the continuations.
        request_features: float64 ``[num_reqs]``.
    """
    token_ids = np.moveaxis(matches.continuations, 2, 1).astype(np.int64)
    exists = np.logical_and.accumulate((token_ids != BREAK) & (matches.lengths > 0)[:, None, :], axis=1)
    same = np.logical_and.accumulate(
        (token_ids[..., :, None] == token_ids[..., None, :]) & exists[..., None] & exists[..., None, :], axis=1
    )
    leaders = same.argmax(axis=3)
    nodes = exists & (leaders == np.arange(token_ids.shape[2]))
    # A match one token longer weighs twice as much; the best weighs 1.
    best = matches.lengths.max(axis=1, keepdims=True, initial=0)
    weights = (np.exp2(np.minimum(matches.lengths - best, 0)) * (matches.lengths > 0)).astype(np.float32)
    supports = same.astype(np.float32) @ np.stack([weights, weights > 0, matches.own & (weights > 0)], 2)[:, None]
    weight, support, own_support = np.moveaxis(supports, 3, 0)
    total = weights.sum(axis=1)[:, None, None]
    parent_weight = np.concatenate([np.broadcast_to(total, weight[:, :1].shape), weight[:, :-1]], axis=1)
    features = np.empty((*token_ids.shape, len(FEATURES)))
    depths = np.arange(token_ids.shape[1])[:, None]
    features[..., 0] = 1.0
    # Once its ancestors are accepted, they are part of the match.
    features[..., 1] = np.log2(np.minimum(matches.lengths[:, None, :] + depths, 64) + 1e-9).clip(min=0.0)
    features[..., 2] = np.log((weight + 1e-3) / (np.maximum(parent_weight - weight, 0.0) + 0.5))
    features[..., 3] = np.log2(support + 1e-9).clip(min=0.0)
    features[..., 4] = np.log2(1.0 + matches.ages[:, None, :]) / 10
    features[..., 5] = request_features[:, None, None]
    models = np.where(own_support == 0, 1, np.where(own_support < support, 2, 0))
    return PrefixTree(token_ids, leaders, nodes, features, models)
