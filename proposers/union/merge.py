"""Merging of drafts: nodes with the same tokens on their paths become one node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_specplug.budget.calibration import LOGIT_LIMIT
from vllm_specplug.cpu.kernels.cpu_ops import call
from vllm_specplug.types import Draft

#: Cases of a source at a node: it drafted no child of the node's parent; it drafted only siblings of the node; it
#: drafted the node.
NOT_EXPANDED, OMITTED, DRAFTED = 0, 1, 2


@dataclass(frozen=True)
class Merged:
    """The nodes of all sources in one list, each path once, ordered by request, depth and source.

    ``num_nodes`` counts the nodes of all requests.  In a list of all rows, the ``num_reqs`` roots come first, and node
    ``i`` is entry ``num_reqs + i``.

    Attributes:
        requests: int64 ``[num_nodes]``; index of the node's request.
        token_ids: int64 ``[num_nodes]``.
        parents: int64 ``[num_nodes]``; the parent's entry in the list of all rows, lower than the node's own.
        depths: int64 ``[num_nodes]``; from 1.
        states: int64 ``[num_sources, num_nodes]``; ``NOT_EXPANDED``, ``OMITTED`` or ``DRAFTED``.
        log_odds: float64 ``[num_sources, num_nodes]``; log odds of the node's acceptance given that its parent is
            accepted, as the source estimates them; 0 where it did not draft the node.
        counts: int64 ``[num_reqs]``; number of nodes of each request.
    """

    requests: np.ndarray
    token_ids: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    states: np.ndarray
    log_odds: np.ndarray
    counts: np.ndarray

    @property
    def num_reqs(self) -> int:
        """Number of requests, including those without nodes."""
        return len(self.counts)


def merge(drafts: Sequence[Draft | None], num_reqs: int) -> Merged:
    """Merge drafts for the same requests.

    Args:
        drafts: one per source, checked by ``Guard``; None for a source that has failed: it expands no node.
        num_reqs: number of requests in each draft.
    """
    sources = [source for source, draft in enumerate(drafts) if draft is not None]
    found = [draft for draft in drafts if draft is not None]
    rows = [(draft.tree.token_ids, draft.tree.parents, draft.tree.num_rows, draft.log_values) for draft in found]
    columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], [], []]
    return Merged(*call("union_merge", *columns, sources, len(drafts), num_reqs, LOGIT_LIMIT))
