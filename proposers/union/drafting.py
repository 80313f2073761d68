"""Drafting by several proposers: what they believe is put on one scale, and the best nodes are verified together."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import torch

from vllm_specplug.calibration import OnlineLogistic, Reliability, sigmoid
from vllm_specplug.guard import Guard
from vllm_specplug.proposer import DraftContext, Remembering, find_method
from vllm_specplug.proposers.union.merge import DRAFTED, SILENT, Merged, merge
from vllm_specplug.proposers.union.options import UnionOptions
from vllm_specplug.tree import NEVER, DraftPool, rerank_draft
from vllm_specplug.types import PADDING, Draft

MAX_RECORDS = 4096


@dataclass(frozen=True)
class _Open:
    """The last proposal, until the next call tells what the target chose."""

    requests: dict[str, int]
    num_tokens: np.ndarray
    merged: Merged
    patterns: np.ndarray
    features: np.ndarray
    log_odds: np.ndarray


class UnionProposer:
    """Merges the drafts of its sources and keeps the nodes most likely to be accepted.

    A node's log odds of acceptance, once its parent is accepted, are linear in those that its sources believe in.
    There is a model for each pattern of agreement (each source drafted the node, drafted siblings only, or nothing
    there): two sources that agree are worth more than either, and a drafter's silence is evidence too.  All drafted
    nodes teach the models, the ones not verified included: what the target chose is known either way.
    """

    def __init__(self, options: UnionOptions):
        self.options = options
        self.names = tuple(source.method for source in options.sources)
        methods = [find_method(source.method) for source in options.sources]
        self._sources = [
            None if method.make is None else method.make(source)
            for method, source in zip(methods, options.sources, strict=True)
        ]
        self._guards = [Guard(f"{name} (in a union)") for name in self.names]
        self.calibration = OnlineLogistic(start_weights(len(self.names)), memory=3000.0)
        self.reliability = Reliability()
        self._open: _Open | None = None
        #: By request: how the nodes of each source have done, ``[num_sources, 2]`` (accepted, expected), with decay.
        self._records: dict[str, np.ndarray] = {}

    def propose(self, context: DraftContext) -> Draft:
        """Draft one tree per request from the sources' drafts; those that fail are left out this time."""
        self._learn(context)
        alone = replace(context, draft_by_host=None)
        drafts: list[Draft | None] = [
            None if source is None else guard(lambda source=source: source.propose(alone), alone)
            for source, guard in zip(self._sources, self._guards, strict=True)
        ]
        if None in self._sources and context.draft_by_host is not None:
            # Last, since whether it pays depends on what the others have.  Where it fails, the runner says so.
            drafts[self._sources.index(None)] = context.draft_by_host(_expected(drafts, len(context.request_ids)))
        merged = merge(drafts, len(context.request_ids))
        patterns = pattern_of(merged)
        features = self._features(merged, context.request_ids)
        log_odds = self.calibration.log_odds(patterns, features)
        requests = {request_id: place for place, request_id in enumerate(context.request_ids)}
        self._open = _Open(requests, context.num_tokens.numpy().copy(), merged, patterns, features, log_odds)
        return self._best(context, merged, log_odds)

    def finish(self, request_ids: Collection[str]) -> None:
        """Pass on to the sources which requests have ended."""
        for request_id in request_ids:
            self._records.pop(request_id, None)
        for source, guard in zip(self._sources, self._guards, strict=True):
            if isinstance(source, Remembering):
                guard.run(lambda source=source: source.finish(request_ids))

    # ---- one call

    def _features(self, merged: Merged, request_ids: tuple[str, ...]) -> np.ndarray:
        """Features ``[num_nodes, 2 + 2 * num_sources]``: one, depth, each source's log odds, its record here."""
        num_sources = len(self.names)
        drafted = merged.states == DRAFTED
        nothing = np.zeros((num_sources, 2))
        records = np.array([self._records.get(request_id, nothing) for request_id in request_ids])
        records = records.reshape(-1, num_sources, 2)
        better = np.clip(np.log((records[..., 0] + 1) / (records[..., 1] + 1)), -2.0, 2.0)
        features = np.ones((len(merged.requests), 2 + 2 * num_sources))
        features[:, 1] = np.log2(merged.depths)
        features[:, 2 : 2 + num_sources] = merged.log_odds.T
        features[:, 2 + num_sources :] = better[merged.requests] * drafted.T
        return features

    def _best(self, context: DraftContext, merged: Merged, log_odds: np.ndarray) -> Draft:
        num_reqs, num_nodes = merged.num_reqs, len(merged.requests)
        log_values = merged.along_paths(np.log(sigmoid(log_odds)), 0.0, np.add)
        counts = np.bincount(merged.requests, minlength=num_reqs)
        starts = np.cumsum(counts) - counts
        columns = np.arange(num_nodes) - starts[merged.requests]
        parents = merged.parents - num_reqs
        is_child_of_root = parents < 0
        parents = np.where(is_child_of_root, PADDING, parents - starts[merged.requests])
        width = max(int(counts.max(initial=0)), 1)

        def spread(values: np.ndarray, fill: float, dtype: type) -> torch.Tensor:
            pool = np.full((num_reqs, width), fill, dtype=dtype)
            pool[merged.requests, columns] = values
            return torch.from_numpy(pool)

        # Level by level: "ties to the lower index" is "ties to the shallower node".
        pool = DraftPool(
            token_ids=spread(merged.token_ids, PADDING, np.int64),
            parents=spread(parents, PADDING, np.int64),
            log_values=spread(log_values, NEVER, np.float32),
            depths=spread(merged.depths, 0, np.int64),
            size=width,
        )
        options = self.options
        draft, rows = rerank_draft(pool, context.root_token_ids, options.num_speculative_tokens, options.node_floor)
        words = spread((1 << np.arange(len(self.names))) @ (merged.states == DRAFTED), 0, np.int64)
        bits = words.gather(1, rows.clamp(min=0)).masked_fill(rows < 0, 0)
        return replace(draft, source_names=self.names, source_bits=bits)

    # ---- learning

    def _learn(self, context: DraftContext) -> None:
        """Compare the last proposal with the tokens that the target has chosen since."""
        last, self._open = self._open, None
        if last is None or len(last.merged.requests) == 0:
            return
        merged, num_reqs = last.merged, last.merged.num_reqs
        now = np.full(num_reqs, -1)
        for place, request_id in enumerate(context.request_ids):
            if request_id in last.requests:
                now[last.requests[request_id]] = place
        token_ids, num_tokens = context.token_ids.numpy(), context.num_tokens.numpy()
        new = np.where(now < 0, 0, num_tokens[now] - last.num_tokens)
        known = merged.depths <= new[merged.requests]
        places = np.minimum(last.num_tokens[merged.requests] + merged.depths - 1, token_ids.shape[1] - 1)
        hits = known & (token_ids[now[merged.requests], places] == merged.token_ids)
        right = merged.along_paths(hits, True, np.logical_and)
        # A node says something where its parent was right and the next token is known.
        parent_right = np.concatenate([np.ones(num_reqs, dtype=bool), right])[merged.parents]
        reached = parent_right & known
        self.reliability.add(sigmoid(last.log_odds[reached]), right[reached])
        self.calibration.learn(last.patterns[reached], last.features[reached], right[reached])
        self._keep_records(last, reached, right)

    def _keep_records(self, last: _Open, reached: np.ndarray, right: np.ndarray) -> None:
        merged, num_sources = last.merged, len(self.names)
        sources, nodes = np.nonzero((merged.states == DRAFTED) & reached)
        cells = merged.requests[nodes] * num_sources + sources
        sums = [
            np.bincount(cells, values, minlength=merged.num_reqs * num_sources)
            for values in (right[nodes], sigmoid(merged.log_odds[sources, nodes]))
        ]
        both = np.stack(sums, axis=1).reshape(merged.num_reqs, num_sources, 2)
        heard = np.bincount(cells // num_sources, minlength=merged.num_reqs) > 0
        for request_id, place in last.requests.items():
            if heard[place]:
                self._records[request_id] = 0.9 * self._records.get(request_id, 0.0) + both[place]
        while len(self._records) > MAX_RECORDS:  # a host that never says what has ended
            del self._records[next(iter(self._records))]


def _expected(drafts: Collection[Draft | None], num_reqs: int) -> torch.Tensor:
    """Tokens that the draft worth most is expected to bring, as its source believes; float ``[num_reqs]``."""
    worth = [draft.log_values[:, 1:].exp().sum(dim=1) for draft in drafts if draft is not None]
    return torch.stack([torch.zeros(num_reqs), *worth]).amax(dim=0)


def pattern_of(merged: Merged) -> np.ndarray:
    """Which model a node takes: what each source says of it, as a number to base 3; int64 ``[num_nodes]``."""
    return (3 ** np.arange(len(merged.states))) @ merged.states


def start_weights(num_sources: int) -> np.ndarray:
    """Models of all patterns before anything is learned, float64 ``[3 ** num_sources, 2 + 2 * num_sources]``.

    A single source is believed; sources that agree add up, though they see the same context; silence counts against.
    """
    weights = np.zeros((3**num_sources, 2 + 2 * num_sources))
    for pattern in range(len(weights)):
        states = [pattern // 3**source % 3 for source in range(num_sources)]
        agreeing = states.count(DRAFTED)
        weights[pattern, 0] = 0.4 * max(agreeing - 1, 0) - 0.5 * states.count(SILENT)
        for source, state in enumerate(states):
            if state == DRAFTED:
                weights[pattern, 2 + source] = (1.0, 0.7, 0.55, 0.45)[agreeing - 1]
                weights[pattern, 2 + num_sources + source] = 0.5 / agreeing
    return weights
