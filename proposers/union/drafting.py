"""Drafting by several proposers: what they believe is put on one scale, and the best nodes are verified together."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import torch

from vllm_specplug.budget.calibration import OnlineLogistic, Reliability, sigmoid
from vllm_specplug.core.guard import Guard
from vllm_specplug.core.pool import DraftPool
from vllm_specplug.core.pruning import rerank_draft
from vllm_specplug.proposer import DraftContext, Remembering, find_method
from vllm_specplug.proposers.union.merge import DRAFTED, SILENT, Merged, merge
from vllm_specplug.proposers.union.options import UnionOptions
from vllm_specplug.types import PADDING, Draft
from vllm_specplug.utils.compiled import compiled

MAX_RECORDS = 4096


@dataclass(frozen=True)
class _Open:
    """The last proposal, until the next call tells what the target chose."""

    request_ids: tuple[str, ...]
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
        self._compile()

    def propose(self, context: DraftContext) -> Draft:
        """Draft one tree per request from the sources' drafts; those that fail are left out this time."""
        self._learn(context)
        alone = context if context.draft_by_model is None else replace(context, draft_by_model=None)
        drafts: list[Draft | None] = [
            None if source is None else guard(lambda source=source: source.propose(alone), alone)
            for source, guard in zip(self._sources, self._guards, strict=True)
        ]
        if None in self._sources and context.draft_by_model is not None:
            # Last, since whether it pays depends on what the others have.  Where it fails, the runner says so.
            drafts[self._sources.index(None)] = context.draft_by_model(_expected(drafts, len(context.request_ids)))
        merged = merge(drafts, len(context.request_ids))
        self._open = last = self._rated(merged, context)
        return self._best(context, last)

    def finish(self, request_ids: Collection[str]) -> None:
        """Pass on to the sources which requests have ended."""
        for request_id in request_ids:
            self._records.pop(request_id, None)
        for source, guard in zip(self._sources, self._guards, strict=True):
            if isinstance(source, Remembering):
                guard.run(lambda source=source: source.finish(request_ids))

    # ---- one call

    def _rated(self, merged: Merged, context: DraftContext) -> _Open:
        """The models' belief in each node.

        Features ``[num_nodes, 2 + 2 * num_sources]``: one, depth, each source's log odds, its record here.
        """
        patterns = pattern_of(merged)
        records = self._records_of(context.request_ids)
        better = np.minimum(np.maximum(np.log((records[..., 0] + 1) / (records[..., 1] + 1)), -2.0), 2.0)
        features = np.empty((len(merged.requests), 2 + 2 * len(self.names)))
        _fill_features(merged.requests, merged.depths, merged.states, merged.log_odds, better, features)
        log_odds = self.calibration.log_odds(patterns, features)
        num_tokens = context.num_tokens.numpy().copy()
        return _Open(context.request_ids, num_tokens, merged, patterns, features, log_odds)

    def _best(self, context: DraftContext, last: _Open) -> Draft:
        merged = last.merged
        width = max(int(merged.counts.max(initial=0)), 1)
        shape = (merged.num_reqs, width)
        token_ids, parents, depths, words = (np.empty(shape, dtype=np.int64) for _ in range(4))
        log_values = np.empty(shape, dtype=np.float32)
        _fill_pool(
            merged.token_ids,
            merged.parents,
            merged.depths,
            merged.states,
            merged.counts,
            np.log(sigmoid(last.log_odds)),
            token_ids,
            parents,
            depths,
            words,
            log_values,
        )
        # Level by level: "ties to the lower index" is "ties to the shallower node".
        pool = DraftPool(*map(torch.from_numpy, (token_ids, parents, log_values, depths)), size=width)
        options = self.options
        draft, rows = rerank_draft(pool, context.root_token_ids, options.num_speculative_tokens, options.node_floor)
        rows = np.ascontiguousarray(rows.numpy())
        bits = np.empty_like(rows)
        _gather(words, rows, bits)
        return Draft(draft.tree, draft.log_values, self.names, torch.from_numpy(bits))

    # ---- learning

    def _learn(self, context: DraftContext) -> None:
        """Compare the last proposal with the tokens that the target has chosen since."""
        last, self._open = self._open, None
        if last is not None and len(last.merged.requests):
            self._compare(last, context)

    def _compare(self, last: _Open, context: DraftContext) -> None:
        merged = last.merged
        if context.request_ids == last.request_ids:
            now = np.arange(merged.num_reqs)
        else:
            places = {request_id: place for place, request_id in enumerate(context.request_ids)}
            now = np.array([places.get(request_id, -1) for request_id in last.request_ids], dtype=np.int64)
        reached = np.empty(len(merged.requests), dtype=np.int64)
        right = np.empty(len(merged.requests), dtype=np.bool_)
        count = _find_outcomes(
            merged.requests,
            merged.token_ids,
            merged.parents,
            merged.depths,
            last.num_tokens,
            now,
            context.token_ids.numpy(),
            context.num_tokens.numpy(),
            reached,
            right,
        )
        reached, right = reached[:count], right[:count]
        self.reliability.add(sigmoid(last.log_odds[reached]), right)
        self.calibration.learn(last.patterns[reached], last.features[reached], right)
        self._keep_records(last, reached, right)

    def _keep_records(self, last: _Open, reached: np.ndarray, right: np.ndarray) -> None:
        merged = last.merged
        records = self._records_of(last.request_ids)
        heard = np.zeros(merged.num_reqs, dtype=np.bool_)
        expected = sigmoid(merged.log_odds)
        _add_to_records(merged.requests, merged.states, expected, reached, right, records, heard)
        for place in heard.nonzero()[0].tolist():
            self._records[last.request_ids[place]] = records[place].copy()
        while len(self._records) > MAX_RECORDS:  # a host that never says what has ended
            del self._records[next(iter(self._records))]

    def _records_of(self, request_ids: tuple[str, ...]) -> np.ndarray:
        """Records of requests, float64 ``[num_reqs, num_sources, 2]``; zeros where there are none."""
        records = np.zeros((len(request_ids), len(self.names), 2))
        for place, request_id in enumerate(request_ids):
            record = self._records.get(request_id)
            if record is not None:
                records[place] = record
        return records

    def _compile(self) -> None:
        """Compile what learns: the first outcomes come in the middle of serving."""
        nothing = torch.zeros(0, dtype=torch.int64)
        context = DraftContext(nothing, torch.zeros((0, 1), dtype=torch.int32), nothing, (), nothing.bool(), 0)
        self._compare(self._rated(merge([None] * len(self.names), 0), context), context)


def _expected(drafts: Collection[Draft | None], num_reqs: int) -> torch.Tensor:
    """Tokens that the draft worth most is expected to bring, as its source believes; float ``[num_reqs]``."""
    most = np.zeros(num_reqs, dtype=np.float32)
    for draft in drafts:
        if draft is not None:
            _raise_to_worth(np.ascontiguousarray(draft.log_values.numpy()), most)
    return torch.from_numpy(most)


@compiled
def _raise_to_worth(log_values: np.ndarray, most: np.ndarray) -> None:
    """Raise float32 ``[num_reqs]`` to the sums of values of all nodes, float32 ``[num_reqs, num_rows]``."""
    for request in range(len(most)):
        worth = np.float32(0.0)
        for row in range(1, log_values.shape[1]):
            worth += np.exp(log_values[request, row])
        most[request] = max(most[request], worth)


@compiled
def _fill_features(
    requests: np.ndarray,
    depths: np.ndarray,
    states: np.ndarray,
    log_odds: np.ndarray,
    better: np.ndarray,
    features: np.ndarray,
) -> None:
    """Fill float64 ``[num_nodes, 2 + 2 * num_sources]``.

    The first four are those of ``Merged``; ``better`` is float64 ``[num_reqs, num_sources]``: how much better the
    source has done in the request than it believed.
    """
    num_sources = len(states)
    for node in range(len(requests)):
        features[node, 0] = 1.0
        features[node, 1] = math.log2(depths[node])
        for source in range(num_sources):
            drafted = states[source, node] == DRAFTED
            features[node, 2 + source] = log_odds[source, node]
            features[node, 2 + num_sources + source] = better[requests[node], source] if drafted else 0.0


@compiled
def _fill_pool(
    merged_ids: np.ndarray,
    merged_parents: np.ndarray,
    merged_depths: np.ndarray,
    states: np.ndarray,
    counts: np.ndarray,
    edges: np.ndarray,
    token_ids: np.ndarray,
    parents: np.ndarray,
    depths: np.ndarray,
    words: np.ndarray,
    log_values: np.ndarray,
) -> None:
    """Fill a pool of all nodes.

    Args:
        merged_ids, merged_parents, merged_depths, states, counts: of ``Merged``.
        edges: float64 ``[num_nodes]``; logarithm of the belief in each node, once its parent is accepted.
        token_ids, parents, depths, log_values: filled; arrays of ``DraftPool``.
        words: int64, same shape, filled; a bit for each source that drafted the node.
    """
    num_reqs, width = token_ids.shape
    values = np.empty(len(edges))
    begin = 0
    for request in range(num_reqs):
        for column in range(counts[request]):
            node = begin + column
            parent = merged_parents[node] - num_reqs  # below 0 for children of the root
            values[node] = edges[node] if parent < 0 else values[parent] + edges[node]
            token_ids[request, column] = merged_ids[node]
            parents[request, column] = PADDING if parent < 0 else parent - begin
            depths[request, column] = merged_depths[node]
            log_values[request, column] = values[node]
            word = 0
            for source in range(len(states)):
                if states[source, node] == DRAFTED:
                    word |= 1 << source
            words[request, column] = word
        for column in range(counts[request], width):
            token_ids[request, column] = PADDING
            parents[request, column] = PADDING
            depths[request, column] = 0
            log_values[request, column] = -np.inf
            words[request, column] = 0
        begin += counts[request]


@compiled
def _gather(words: np.ndarray, columns: np.ndarray, found: np.ndarray) -> None:
    """Fill int64 ``[num_reqs, num_rows]`` with the words in these columns of their rows; 0 where the column is < 0."""
    for request in range(columns.shape[0]):
        for row in range(columns.shape[1]):
            column = columns[request, row]
            found[request, row] = words[request, column] if column >= 0 else 0


@compiled
def _find_outcomes(
    requests: np.ndarray,
    node_ids: np.ndarray,
    parents: np.ndarray,
    depths: np.ndarray,
    num_before: np.ndarray,
    now: np.ndarray,
    token_ids: np.ndarray,
    num_tokens: np.ndarray,
    reached: np.ndarray,
    right: np.ndarray,
) -> int:
    """Find the nodes that say something: their parent was right, and the token behind it is known.

    Args:
        requests, node_ids, parents, depths: of ``Merged``.
        num_before: int64 ``[num_reqs]``; tokens of each request when it was drafted for.
        now: int64 ``[num_reqs]``; its place in the batch now, -1 where it has none.
        token_ids, num_tokens: of ``DraftContext``.
        reached: int64 ``[num_nodes]``; filled with those nodes.
        right: bool ``[num_nodes]``; filled with whether each of them was right.

    Returns:
        How many there are.
    """
    num_reqs, num_nodes = len(now), len(requests)
    node_right = np.zeros(num_nodes, dtype=np.bool_)
    count = 0
    for node in range(num_nodes):
        request, parent = requests[node], parents[node] - num_reqs  # below 0 for children of the root
        if now[request] < 0 or (parent >= 0 and not node_right[parent]):
            continue
        place = num_before[request] + depths[node] - 1
        if place >= num_tokens[now[request]]:
            continue
        node_right[node] = token_ids[now[request], place] == node_ids[node]
        reached[count] = node
        right[count] = node_right[node]
        count += 1
    return count


@compiled
def _add_to_records(
    requests: np.ndarray,
    states: np.ndarray,
    expected: np.ndarray,
    reached: np.ndarray,
    right: np.ndarray,
    records: np.ndarray,
    heard: np.ndarray,
) -> None:
    """Add outcomes to the records of their requests, which fade before.

    Args:
        requests, states: of ``Merged``.
        expected: float64 ``[num_sources, num_nodes]``; what each source believed.
        reached: int64 ``[num_outcomes]``; nodes.
        right: bool ``[num_outcomes]``.
        records: float64 ``[num_reqs, num_sources, 2]``; changed where there is an outcome of a drafted node.
        heard: bool ``[num_reqs]``, false; set for those.
    """
    for place, node in enumerate(reached):
        request = requests[node]
        for source in range(len(states)):
            if states[source, node] != DRAFTED:
                continue
            if not heard[request]:
                heard[request] = True
                for other in range(len(states)):
                    records[request, other, 0] *= 0.9
                    records[request, other, 1] *= 0.9
            records[request, source, 0] += right[place]
            records[request, source, 1] += expected[source, node]


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
