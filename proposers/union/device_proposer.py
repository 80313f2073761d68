"""The union proposer of vLLM's V2 runner."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_specplug.kernels.triton_growth import rerank_draft
from vllm_specplug.kernels.triton_union import merged_pool
from vllm_specplug.proposer import DeviceDraftContext, find_method
from vllm_specplug.proposers.union.device import kernel_columns, kernel_weights
from vllm_specplug.proposers.union.options import UnionOptions
from vllm_specplug.types import Draft


class UnionOnDevice:
    """Merges the drafts of its sources: the drafter with weights first, then the model-free ones."""

    def __init__(self, options: UnionOptions):
        methods = [(find_method(source.method), source) for source in options.sources]
        self._has_model = any(method.model is not None for method, _ in methods)
        self._sources = [method.make_on_device(source) for method, source in methods if method.model is None]
        self._num_nodes = options.num_speculative_tokens

    def propose(self, context: DeviceDraftContext) -> Draft:
        """Draft one tree per request."""
        drafts = [context.draft_by_model()] if self._has_model else []
        drafts += [source.propose(context) for source in self._sources]
        return merge_drafts(drafts, self._num_nodes)


def merge_drafts(drafts: Sequence[Draft], num_nodes: int) -> Draft:
    """Merge drafts as ``device.merge_drafts`` does, in a few launches."""
    trees = [draft.tree for draft in drafts]
    token_ids = torch.cat([tree.token_ids for tree in trees], dim=1)
    widths, device = tuple(tree.token_ids.shape[1] for tree in trees), token_ids.device
    pool = merged_pool(
        token_ids,
        torch.cat([tree.depths for tree in trees], dim=1),
        torch.cat([tree.parents for tree in trees], dim=1),
        torch.cat([draft.log_values for draft in drafts], dim=1),
        kernel_columns(widths, device),
        max(widths),
        *kernel_weights(len(drafts), device),
    )
    return rerank_draft(pool, trees[0].token_ids[:, 0].contiguous(), num_nodes)[0]
