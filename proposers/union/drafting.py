"""The union proposer: merges the drafts of several proposers into one tree of the nodes most likely to be accepted."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import torch

from vllm_specplug.budget.calibration import sigmoid
from vllm_specplug.core.guard import Guard
from vllm_specplug.core.outcomes import common_requests
from vllm_specplug.cpu.kernels.tree_ops import prune, rerank_draft
from vllm_specplug.proposer import DraftContext, Remembering, find_method
from vllm_specplug.proposers.union.learning import MergeLearner, ValuedMerge
from vllm_specplug.proposers.union.merge import DRAFTED, Merged, merge
from vllm_specplug.proposers.union.options import CHEAP_NODES, UnionOptions
from vllm_specplug.types import PADDING, Draft

#: Most requests whose records are kept, for callers that never report ended requests.
MAX_RECORDS = 4096


@dataclass(frozen=True)
class _LastDraft:
    """The last draft, kept until the next call shows which tokens the target chose.

    Attributes:
        request_ids: requests that were drafted for.
        num_tokens: int64 ``[num_reqs]``; tokens that each had.
        valued: the nodes of all sources.
    """

    request_ids: tuple[str, ...]
    num_tokens: np.ndarray
    valued: ValuedMerge


class UnionProposer(MergeLearner):
    """Merges the drafts of its sources and keeps the nodes most likely to be accepted.

    The log odds of a node's acceptance, given that its parent is accepted, are linear in the log odds that its sources
    estimate.  Each pattern of agreement (a source drafted the node, drafted only its siblings, or drafted nothing
    there) has its own weights: a node that two sources drafted is more likely to be accepted, and one that a source
    omitted is less likely.  The weights are learned from all drafted nodes, verified or not: the target's tokens show
    which of them were right.
    """

    def __init__(self, options: UnionOptions):
        super().__init__(len(options.sources))
        self.options = options
        self.names = tuple(source.method for source in options.sources)
        methods = [find_method(source.method) for source in options.sources]
        self._sources = [
            None if method.make is None else method.make(source)
            for method, source in zip(methods, options.sources, strict=True)
        ]
        self._guards = [Guard(f"{name} (in a union)") for name in self.names]
        self._log_floor = math.log(options.node_floor) if options.node_floor > 0 else -math.inf
        self._last_draft: _LastDraft | None = None
        #: By request: accepted and expected nodes of each source, ``[num_sources, 2]``, with decay.
        self._records: dict[str, np.ndarray] = {}

    def propose(self, context: DraftContext) -> Draft:
        """Draft one tree per request from the sources' drafts, without those of sources that fail in this call."""
        self._learn(context)
        model_free = context if context.draft_by_model is None else replace(context, draft_by_model=None)
        drafts: list[Draft | None] = [
            None if source is None else guard(lambda source=source: source.propose(model_free), model_free)
            for source, guard in zip(self._sources, self._guards, strict=True)
        ]
        if None in self._sources and context.draft_by_model is not None:
            # The model drafter comes last: whether it is worth its cost depends on the other drafts.  The runner
            # reports its failures.
            drafts[self._sources.index(None)] = context.draft_by_model(_expected(drafts, len(context.request_ids)))
        alone = self._only_by_model(drafts)
        return alone if alone is not None else self._select(merge(drafts, len(context.request_ids)), context)

    def finish(self, request_ids: Collection[str]) -> None:
        """Forget ended requests, and report them to the sources."""
        for request_id in request_ids:
            self._records.pop(request_id, None)
        for source, guard in zip(self._sources, self._guards, strict=True):
            if isinstance(source, Remembering):
                guard.run(lambda source=source: source.finish(request_ids))

    def _select(self, merged: Merged, context: DraftContext) -> Draft:
        """Estimate each node's acceptance, remember the draft for ``_learn``, and keep the best nodes."""
        records = self._records_of(context.request_ids)
        ratios = np.minimum(np.maximum(np.log((records[..., 0] + 1) / (records[..., 1] + 1)), -2.0), 2.0)
        valued = self.value(merged, ratios)
        self._last_draft = _LastDraft(context.request_ids, context.num_tokens.numpy().copy(), valued)
        # A request's nodes are ordered by depth, so that ties go to the shallower node.
        options, pool = self.options, valued.pool
        draft, rows = rerank_draft(pool, context.root_token_ids, options.num_speculative_tokens, options.node_floor)
        source_bits = torch.from_numpy(valued.source_bits).gather(1, rows.clamp(min=0)).masked_fill(rows < 0, 0)
        draft = Draft(draft.tree, draft.log_values, self.names, source_bits)
        return self._without_costly(draft)

    def _without_costly(self, draft: Draft) -> Draft:
        """Leave out nodes below ``costly_node_floor`` that are not among the best ``CHEAP_NODES`` of their tree."""
        has_costly = self.options.costly_node_floor > self.options.node_floor
        if not has_costly or (draft.tree.num_rows.numpy() <= CHEAP_NODES + 1).all():
            return draft
        values = draft.log_values.numpy()
        last_cheap = np.partition(values[:, 1:], -CHEAP_NODES, axis=1)[:, -CHEAP_NODES]
        floors = np.minimum(last_cheap, math.log(self.options.costly_node_floor))
        return prune(draft, torch.from_numpy(values >= floors[:, None]))

    def _only_by_model(self, drafts: list[Draft | None]) -> Draft | None:
        """Return the model drafter's draft with its own values, if no other source drafted a node; else None.

        Most steps have no match: merging would take time and change little.
        """
        source = self._sources.index(None) if None in self._sources else None
        draft = None if source is None else drafts[source]
        if draft is None or draft.tree.token_ids.shape[1] > self.options.num_speculative_tokens + 1:
            return None
        if any(other is not None and other.tree.num_rows.numpy().max() > 1 for other in drafts if other is not draft):
            return None
        is_node = draft.tree.parents.numpy() != PADDING
        bits = torch.from_numpy(is_node.astype(np.int64) << source)
        draft = Draft(draft.tree, draft.log_values, self.names, bits)
        kept = draft.log_values.numpy() >= self._log_floor
        return self._without_costly(prune(draft, torch.from_numpy(kept)) if (is_node & ~kept).any() else draft)

    def _learn(self, context: DraftContext) -> None:
        """Compare the last draft with the tokens that the target has chosen since."""
        last, self._last_draft = self._last_draft, None
        if last is not None and len(last.valued.merged.requests):
            self._compare(last, context)

    def _compare(self, last: _LastDraft, context: DraftContext) -> None:
        then, now = common_requests(last.request_ids, context.request_ids)
        same_answer = last.num_tokens[then] > context.prompt_lens.numpy()[now]  # else an input follows the draft
        then, now = then[same_answer], now[same_answer]
        nodes, accepted = self.learn(
            last.valued,
            then,
            context.token_ids.numpy(),
            now,
            last.num_tokens[then],
            context.num_tokens.numpy()[now],
        )
        self._keep_records(last, nodes, accepted)

    def _keep_records(self, last: _LastDraft, nodes: np.ndarray, accepted: np.ndarray) -> None:
        merged = last.valued.merged
        records = self._records_of(last.request_ids)
        for request in _add_to_records(merged, sigmoid(merged.log_odds), nodes, accepted, records).tolist():
            self._records[last.request_ids[request]] = records[request].copy()
        while len(self._records) > MAX_RECORDS:
            del self._records[next(iter(self._records))]

    def _records_of(self, request_ids: tuple[str, ...]) -> np.ndarray:
        """Return the records of requests, float64 ``[num_reqs, num_sources, 2]``; zeros for requests without one."""
        records = np.zeros((len(request_ids), len(self.names), 2))
        for request, request_id in enumerate(request_ids):
            record = self._records.get(request_id)
            if record is not None:
                records[request] = record
        return records


def _expected(drafts: Collection[Draft | None], num_reqs: int) -> torch.Tensor:
    """Return the most accepted tokens that any of the drafts is expected to bring; float32 ``[num_reqs]``."""
    most = np.zeros(num_reqs, dtype=np.float32)
    for draft in drafts:
        if draft is not None:
            most = np.maximum(most, np.exp(draft.log_values.numpy()[:, 1:]).sum(axis=1))
    return torch.from_numpy(most)


def _add_to_records(
    merged: Merged, expected: np.ndarray, nodes: np.ndarray, accepted: np.ndarray, records: np.ndarray
) -> np.ndarray:
    """Add outcomes to the records of their requests, after these have decayed.

    Args:
        merged: all nodes.
        expected: float64 ``[num_sources, num_nodes]``; probabilities of acceptance as each source estimates them.
        nodes: int64 ``[num_outcomes]``; each was drafted by a source.
        accepted: bool ``[num_outcomes]``.
        records: float64 ``[num_reqs, num_sources, 2]``; updated for requests with an outcome.

    Returns:
        int64: these requests.
    """
    requests, drafted = merged.requests[nodes], merged.states[:, nodes].T == DRAFTED
    found = np.unique(requests)
    records[found] *= 0.9
    np.add.at(records[..., 0], requests, drafted & accepted[:, None])
    np.add.at(records[..., 1], requests, np.where(drafted, expected[:, nodes].T, 0.0))
    return found
