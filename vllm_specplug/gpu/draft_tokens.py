"""Copies of drafts for grammars, which live on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from vllm_specplug.gpu.trees import DeviceTrees
from vllm_specplug.vllm.grammars import TreeDraftTokenIds


class TreeDraftTokensHandler(DraftTokensHandler):
    """Copies the parents of drafted nodes with their tokens, where vLLM copies the tokens: asynchronously, and for
    batches with structured output only.

    Args:
        device: of the drafts.
        trees: holds the parents.
    """

    def __init__(self, device: torch.device, trees: DeviceTrees):
        super().__init__(device)
        self._trees = trees

    def set_draft_tokens(self, input_batch: Any, draft_tokens: torch.Tensor) -> None:
        """Start the copy of ``draft_tokens``, int64 ``[num_reqs, num_nodes]``, if a grammar needs it."""
        if input_batch.has_structured_output_reqs:
            parents = self._trees.parents[input_batch.idx_mapping, 1 : draft_tokens.shape[1] + 1]
            draft_tokens = torch.cat([draft_tokens, parents], dim=1)
        super().set_draft_tokens(input_batch, draft_tokens)

    def get_draft_tokens(self) -> TreeDraftTokenIds:
        """Return the last drafts; without a copy they are placeholders without parents."""
        drafts = super().get_draft_tokens()
        if self.draft_tokens_np is None:
            return TreeDraftTokenIds(drafts.req_ids, drafts.draft_token_ids)
        width = self.num_draft_tokens // 2
        tokens, parents = ([row[part] for row in drafts.draft_token_ids] for part in (slice(width), slice(width, None)))
        return TreeDraftTokenIds(drafts.req_ids, tokens, parents)
