"""The lookup proposer of vLLM's V2 runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_specplug.kernels.triton_growth import rerank_draft
from vllm_specplug.kernels.triton_lookup import continuations
from vllm_specplug.proposer import DeviceDraftContext, LateOutcome
from vllm_specplug.proposers.lookup.device import kernel_table
from vllm_specplug.proposers.lookup.learning import MatchLearner
from vllm_specplug.proposers.lookup.matches import Matches
from vllm_specplug.proposers.lookup.options import LookupOptions
from vllm_specplug.types import Draft


@dataclass(frozen=True)
class _Buffers:
    """What keeps its address, so that CUDA graphs can read and write it.

    Attributes:
        table: see ``kernel_table``.
        token_ids: int64 ``[max_num_reqs, draft_depth * max_candidates]``; the continuations of the last draft.
        matches: int32 ``[max_num_reqs, 2, max_candidates]``; lengths and ages of its matches.
    """

    table: torch.Tensor
    token_ids: torch.Tensor
    matches: torch.Tensor


class LookupOnDevice:
    """Drafts continuations of matches in each request's own tokens, which V2 keeps on the GPU.

    ``device.draft_matches`` is the reference; here it takes three launches.  It is a ``DeviceLearner``.
    """

    def __init__(self, options: LookupOptions):
        self._options, self.learner = options, MatchLearner()
        self._buffers: _Buffers | None = None  # the device is known at the first call

    def propose(self, context: DeviceDraftContext) -> Draft:
        """Draft one tree per request."""
        options, buffers = self._options, self._buffers or self._make_buffers(context.token_ids)
        pool = continuations(
            context.token_ids,
            context.slots,
            context.num_tokens,
            min_match=options.min_match,
            max_match=options.max_match,
            max_candidates=options.max_candidates,
            draft_depth=options.draft_depth,
            table=buffers.table,
            kept=(buffers.token_ids, buffers.matches),
        )
        return rerank_draft(pool, context.root_token_ids, options.num_speculative_tokens)[0]

    def _make_buffers(self, token_ids: torch.Tensor) -> _Buffers:
        num_reqs, count, device = len(token_ids), self._options.max_candidates, token_ids.device
        self._buffers = _Buffers(
            torch.from_numpy(kernel_table(self.learner.calibration.weights)).to(device, copy=True),
            torch.zeros(num_reqs, self._options.draft_depth * count, dtype=torch.int64, device=device),
            torch.zeros(num_reqs, 2, count, dtype=torch.int32, device=device),
        )
        return self._buffers

    # ---- learning

    def drafted(self) -> tuple[torch.Tensor, ...]:
        buffers = self._buffers
        return () if buffers is None else (buffers.token_ids, buffers.matches)

    def tables(self) -> list[tuple[np.ndarray, torch.Tensor]]:
        buffers = self._buffers
        return [] if buffers is None else [(kernel_table(self.learner.calibration.weights), buffers.table)]

    def learn(self, drafted: Sequence[torch.Tensor], outcome: LateOutcome) -> None:
        token_ids, matches = (values.numpy() for values in drafted)
        num_reqs, count = len(token_ids), self._options.max_candidates
        continuations = token_ids.reshape(num_reqs, -1, count).transpose(0, 2, 1)
        lengths, ages = (np.ascontiguousarray(matches[:, which], dtype=np.int64) for which in range(2))
        found = Matches(
            np.ascontiguousarray(continuations, dtype=np.int32), lengths, ages, np.ones_like(lengths, dtype=np.bool_)
        )
        valued = self.learner.value(found, np.zeros(num_reqs), np.arange(num_reqs), num_reqs)
        self.learner.learn(valued, *outcome.arguments())
