"""The lookup proposer of vLLM's V2 runner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_specplug.budget.calibration import LOGIT_LIMIT
from vllm_specplug.gpu.kernels.growth import rerank_draft
from vllm_specplug.gpu.kernels.lookup import LookupBuffers, continuations, keep_answer
from vllm_specplug.proposer import DeviceDraftContext, EndedRequest, LateOutcome
from vllm_specplug.proposers.lookup.index import BREAK
from vllm_specplug.proposers.lookup.learning import MatchLearner
from vllm_specplug.proposers.lookup.matches import LONG_ANCHOR, Matches
from vllm_specplug.proposers.lookup.options import LookupOptions
from vllm_specplug.types import Draft

#: Added to the weight of the matches that agree on a token.
LEAST_WEIGHT = 1e-3


class LookupOnDevice:
    """Drafts continuations of matches in each request's tokens and in ended requests' answers, all kept on the GPU.

    It takes three launches.  ``LookupProposer`` is the reference, except for more matches than ``max_candidates``: here
    the longest of all are drafted, not the longest of the newest.  It is a ``DeviceLearner`` and a
    ``DeviceRemembering``.
    """

    def __init__(self, options: LookupOptions):
        self._options, self.learner = options, MatchLearner()
        self._buffers: LookupBuffers | None = None  # the device is known at the first call

    def propose(self, context: DeviceDraftContext) -> Draft:
        """Draft one tree per request."""
        options, buffers = self._options, self._buffers or self._make_buffers(context.token_ids)
        pool = continuations(
            context.token_ids,
            context.slots,
            context.num_tokens,
            context.namespaces,
            min_match=options.min_match,
            max_match=options.max_match,
            max_candidates=options.max_candidates,
            draft_depth=options.draft_depth,
            min_traffic_match=self._min_traffic_match,
            buffers=buffers,
        )
        return rerank_draft(pool, context.root_token_ids, options.num_speculative_tokens)[0]

    @property
    def _min_traffic_match(self) -> int:
        """Return the shortest match in other requests' answers: shorter ones occur everywhere."""
        return max(self._options.min_match, LONG_ANCHOR)

    def finish(self, ended: EndedRequest) -> None:
        if self._buffers is not None:
            keep_answer(*ended, longer_than=LONG_ANCHOR, buffers=self._buffers)

    def _make_buffers(self, token_ids: torch.Tensor) -> LookupBuffers:
        num_reqs, count, device = len(token_ids), self._options.max_candidates, token_ids.device
        self._buffers = LookupBuffers(
            torch.from_numpy(kernel_table(self.learner.calibration.weights)).to(device, copy=True),
            torch.zeros(num_reqs, self._options.draft_depth * count, dtype=torch.int64, device=device),
            torch.zeros(num_reqs, 3, count, dtype=torch.int32, device=device),
            torch.full((self._options.kept_tokens + 1,), BREAK, dtype=torch.int32, device=device),
            torch.zeros(self._options.kept_tokens + 1, dtype=torch.int64, device=device),
            torch.zeros(2, dtype=torch.int32, device=device),
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
        continuations = token_ids.reshape(num_reqs, self._options.draft_depth, count).transpose(0, 2, 1)
        lengths, ages = (np.ascontiguousarray(matches[:, which], dtype=np.int64) for which in range(2))
        found = Matches(
            np.ascontiguousarray(continuations, dtype=np.int32), lengths, ages, np.ascontiguousarray(matches[:, 2] > 0)
        )
        valued = self.learner.value(found, np.zeros(num_reqs), np.arange(num_reqs), num_reqs)
        self.learner.learn(valued, *outcome.arguments())


def kernel_table(weights: np.ndarray) -> np.ndarray:
    """Return what ``kernels.triton_lookup.continuations`` needs of ``MatchLearner.calibration.weights``.

    float64 ``[2 + num_scopes * num_features]``: ``LEAST_WEIGHT``, the limit of log odds, the weights.
    """
    return np.concatenate([[LEAST_WEIGHT, LOGIT_LIMIT], weights.ravel()])
