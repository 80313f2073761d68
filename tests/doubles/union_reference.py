"""The reference of ``kernels.triton_union``: merging of drafts in torch.

Nodes are merged as in ``merge`` and valued as in ``learning``; the sources' records in each request count as 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch.nn.functional import logsigmoid

from vllm_specplug.budget.calibration import LOGIT_LIMIT
from vllm_specplug.core.pool import NEVER, DraftPool
from vllm_specplug.core.pruning import rerank_draft
from vllm_specplug.proposers.union.learning import start_weights
from vllm_specplug.proposers.union.merge import DRAFTED, OMITTED
from vllm_specplug.types import PADDING, Draft


def merge_drafts(drafts: Sequence[Draft], num_nodes: int, weights: torch.Tensor | None = None) -> Draft:
    """Merge drafts for the same requests and keep the best nodes.

    Args:
        drafts: one per source, with the same roots.
        num_nodes: number of nodes to keep.
        weights: float64, of ``MergeLearner.calibration``; None: ``start_weights``.
    """
    pool = merged_pool(drafts, weights)
    return rerank_draft(pool, pool.token_ids[:, 0], num_nodes)[0]


def merged_pool(drafts: Sequence[Draft], weights: torch.Tensor | None = None) -> DraftPool:
    """Return the pool of merged nodes; the first of equal ones stands for them.  Arguments as of ``merge_drafts``."""
    rows = _Rows(drafts)
    estimates, pattern = [], torch.zeros_like(rows.token_ids)
    for source, columns in enumerate(rows.sources):
        own = rows.same[:, :, columns]
        drafted = own.any(dim=2)
        # The first of equal siblings counts.
        log_odds = rows.log_odds[:, columns].gather(1, own.byte().argmax(dim=2))
        estimates.append(log_odds.masked_fill(~drafted, 0.0))
        children = rows.parents[:, None, columns].expand_as(own)
        expanded = (rows.same.gather(2, children) & rows.nodes[:, None, columns]).any(dim=2)
        omitted = expanded.gather(1, rows.parents) & ~drafted
        pattern += 3**source * (DRAFTED * drafted + OMITTED * omitted)
    weights = (_start_weights(len(drafts), pattern.device) if weights is None else weights)[pattern]
    features = torch.stack([torch.ones_like(estimates[0]), rows.depths.clamp(min=1).double().log2(), *estimates], dim=2)
    log_odds = (weights[:, :, : features.shape[2]] * features).sum(dim=2)
    log_values = logsigmoid(log_odds.clamp(-LOGIT_LIMIT, LOGIT_LIMIT)).masked_fill(~rows.nodes, 0.0)
    for ancestor in rows.ancestors:
        log_values = log_values + log_values.gather(1, ancestor)
    leaders = rows.same.byte().argmax(dim=2)
    merged = rows.nodes & (leaders == torch.arange(leaders.shape[1], device=leaders.device))
    return DraftPool(
        token_ids=rows.token_ids,
        # A leader comes before the children of all rows with its path.
        parents=leaders.gather(1, rows.parents).masked_fill(rows.depths == 1, PADDING),
        log_values=log_values.masked_fill(~merged, NEVER).float(),
        depths=rows.depths,
        size=leaders.shape[1],
    )


class _Rows:
    """The rows of all drafts next to each other, including the roots.

    Attributes:
        sources: the columns of each draft.
        token_ids, depths: int64 ``[num_reqs, num_rows]``; as in ``TokenTree``.
        parents: int64, same shape; a root is the parent of itself and of its draft's padding rows.
        nodes: bool, same shape; false for roots and padding.
        log_odds: float64, same shape; log odds of the node's acceptance given that its parent is accepted, as estimated
            by its source.
        ancestors: list of int64, same shape; the ancestors at distance 1, 2, 4 and so on.
        same: bool ``[num_reqs, num_rows, num_rows]``; true where the paths to two rows have equal tokens.
    """

    def __init__(self, drafts: Sequence[Draft]):
        widths = [draft.tree.token_ids.shape[1] for draft in drafts]
        starts = [sum(widths[:source]) for source in range(len(widths))]
        self.sources = [slice(start, start + width) for start, width in zip(starts, widths, strict=True)]
        trees = [draft.tree for draft in drafts]
        self.token_ids = torch.cat([tree.token_ids for tree in trees], dim=1)
        self.depths = torch.cat([tree.depths for tree in trees], dim=1)
        self.parents = torch.cat(
            [tree.parents.clamp(min=0) + start for tree, start in zip(trees, starts, strict=True)], dim=1
        )
        self.nodes = self.depths > 0
        values = torch.cat([draft.log_values for draft in drafts], dim=1).double()
        edges = (values - values.gather(1, self.parents)).masked_fill(~self.nodes, 0.0).clamp(max=0.0)
        self.log_odds = (edges - torch.log(-torch.expm1(edges))).clamp(-LOGIT_LIMIT, LOGIT_LIMIT)
        self.ancestors = [self.parents]
        for _ in range((max(widths) - 1).bit_length() - 1):
            self.ancestors.append(self.ancestors[-1].gather(1, self.ancestors[-1]))
        self.same = self._same_paths()

    def _same_paths(self) -> torch.Tensor:
        """Compare the paths of all pairs of rows by pointer jumping, as in ``layout.ancestor_mask``."""
        exists = self.token_ids != PADDING
        same = exists.unsqueeze(2) & exists.unsqueeze(1)
        for values in (self.token_ids, self.depths):
            same = same & (values.unsqueeze(2) == values.unsqueeze(1))
        for ancestor in self.ancestors:
            above = same.gather(1, ancestor.unsqueeze(2).expand_as(same))
            same = same & above.gather(2, ancestor.unsqueeze(1).expand_as(same))
        return same


@lru_cache(maxsize=16)
def _start_weights(num_sources: int, device: torch.device) -> torch.Tensor:
    """Return ``start_weights`` on a device; cached, so that no call copies it again."""
    return torch.from_numpy(start_weights(num_sources)).to(device)
