"""Learning of model-free proposers on the V2 runner, from copies that arrive some steps after their drafts.

A draft phase starts copies of its drafts.  The verification after it starts copies of the emitted tokens.  A later
draft phase learns from both once they have arrived, and copies what was learned to the device before it drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_specplug.core.outcomes import common_requests
from vllm_specplug.gpu.late_copies import LateCopies, start_copy
from vllm_specplug.proposer import DeviceLearner, LateOutcome
from vllm_specplug.types import Walk
from vllm_specplug.vllm.ranks import several_ranks

#: Most requests of a draft phase that are learned from: learning takes CPU time between two steps.  Chosen by hand.
MOST_REQUESTS = 8
#: With tensor parallelism, the newest verified draft phases that are not learned from yet.  When vLLM launches a step,
#: it has the tokens of the step before the last one on the CPU, so copies of that step have arrived too.
LAG = 2


@dataclass(frozen=True)
class _Verified:
    """A draft and what the target emitted after it, as copies.

    Attributes:
        drafted_for: requests of the rows of ``drafted``.
        drafted: see ``DeviceLearner.drafted``.
        req_ids: requests of the step that verified it.
        has_drafts: bool ``[num_reqs]``; of these, whether drafts of the request were verified.
        token_ids: int64 ``[num_reqs, width]``; emitted by that step.
        num_tokens: int ``[num_reqs]``; valid entries of its rows.
    """

    drafted_for: list[str]
    drafted: tuple[torch.Tensor, ...]
    req_ids: list[str]
    has_drafts: np.ndarray
    token_ids: torch.Tensor
    num_tokens: torch.Tensor

    def outcome(self) -> LateOutcome:
        """Return the outcomes of the requests that were drafted for and verified."""
        now, then = common_requests(self.req_ids, self.drafted_for)
        verified = self.has_drafts[now]
        now, then = now[verified], then[verified]
        token_ids = np.ascontiguousarray(self.token_ids.numpy(), dtype=np.int32)
        return LateOutcome(then, token_ids, now, self.num_tokens.numpy().astype(np.int64)[now])


class LateLearning:
    """Teaches a proposer.

    Args:
        proposer: of the draft method.
        device: on which it drafts.

    Attributes:
        is_on: whether it learns; not before ``start``.
    """

    def __init__(self, proposer: DeviceLearner, device: torch.device):
        self._proposer, self.is_on = proposer, False
        self._copies: LateCopies[_Verified] = LateCopies(device, LAG if several_ranks() else None)
        #: The last draft phase, until it is verified.
        self._drafted: tuple[list[str], tuple[torch.Tensor, ...]] | None = None
        #: Contents of the device's tables, by number of the table.
        self._uploaded: dict[int, np.ndarray] = {}
        self._num_phases = 0

    def start(self) -> None:
        """Learn from here on; runs before the server serves are not learned from.

        It also compiles what learns: no request should wait for the compiler.
        """
        nothing = np.zeros(0, dtype=np.int64)
        if drafted := [values[:0].cpu() for values in self._proposer.drafted()]:
            outcome = LateOutcome(nothing, np.zeros((0, 1), dtype=np.int32), nothing, nothing)
            self._proposer.learn(drafted, outcome)
        self.is_on = True

    @torch.inference_mode()
    def begin_phase(self) -> None:
        """Learn from what has arrived.  Call it before each draft phase: the last one's drafts are then gone."""
        self._drafted = None
        arrived = list(self._copies.take())
        for one in arrived:
            self._learn(one)
        if arrived:
            self._upload()

    def _learn(self, one: _Verified) -> None:
        if len((outcome := one.outcome()).requests):
            self._proposer.learn(one.drafted, outcome)

    def _upload(self) -> None:
        """Copy changed tables to the device without waiting."""
        for number, (values, table) in enumerate(self._proposer.tables()):
            if not np.array_equal(values, self._uploaded.get(number)):
                async_tensor_h2d(values, out=table)
                self._uploaded[number] = values.copy()

    def drafted(self, req_ids: list[str], at_once: int) -> None:
        """Copy the drafts of a phase, of at most ``MOST_REQUESTS`` requests, others in each phase.

        Args:
            req_ids: requests of the batch.
            at_once: a larger batch was drafted in parts of so many; the buffers hold the last part.
        """
        if not self.is_on:
            return
        part = req_ids[(len(req_ids) - 1) // at_once * at_once :]
        begin = self._num_phases * MOST_REQUESTS % len(part) if len(part) > MOST_REQUESTS else 0
        rows = slice(begin, begin + MOST_REQUESTS)
        self._num_phases += 1
        copies = tuple(start_copy(values[: len(part)][rows]) for values in self._proposer.drafted())
        self._drafted = (part[rows], copies)

    def verified(self, input_batch: Any, walk: Walk) -> None:
        """Copy what a step emitted after the last draft phase."""
        if self._drafted is None:
            return
        has_drafts = np.asarray(input_batch.num_draft_tokens_per_req) > 0
        # While a prompt is read, its drafts are not used.
        has_drafts &= ~input_batch.is_prefilling_np[: len(has_drafts)]
        copies = start_copy(walk.output_token_ids), start_copy(walk.num_emitted)
        self._copies.add(_Verified(*self._drafted, list(input_batch.req_ids), has_drafts, *copies))
        self._drafted = None
