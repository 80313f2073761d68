"""The union proposer of vLLM's V2 runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from vllm_specplug.budget.calibration import LOGIT_LIMIT
from vllm_specplug.core.tree import from_flat
from vllm_specplug.gpu.kernels.growth import rerank_draft
from vllm_specplug.gpu.kernels.union import merged_pool
from vllm_specplug.proposer import (
    DeviceDraftContext,
    DeviceLearner,
    DeviceRemembering,
    EndedRequest,
    LateOutcome,
    find_method,
)
from vllm_specplug.proposers.union.learning import MergeLearner
from vllm_specplug.proposers.union.merge import merge
from vllm_specplug.proposers.union.options import UnionOptions
from vllm_specplug.types import Draft


@dataclass(frozen=True)
class Merging:
    """Tensors that keep their addresses, so that CUDA graphs can read and write them.

    Attributes:
        weights: float64, as ``MergeLearner.calibration.weights``.
        widths: rows of each source's drafts.
        token_ids, parents: int64 ``[max_num_reqs, sum(widths)]``; the last drafts next to each other.
        log_values: float32, like them.
    """

    weights: torch.Tensor
    widths: tuple[int, ...]
    token_ids: torch.Tensor
    parents: torch.Tensor
    log_values: torch.Tensor

    @staticmethod
    def make(weights: np.ndarray, drafts: Sequence[Draft], max_num_reqs: int) -> Merging:
        """Make the buffers for drafts of these widths."""
        widths, device = tuple(draft.log_values.shape[1] for draft in drafts), drafts[0].log_values.device
        token_ids, parents = torch.zeros(2, max_num_reqs, sum(widths), dtype=torch.int64, device=device)
        log_values = torch.zeros_like(token_ids, dtype=torch.float32)
        return Merging(torch.tensor(weights, device=device), widths, token_ids, parents, log_values)


class UnionOnDevice:
    """Merges the drafts of its sources: the drafter with weights first, then the model-free ones.

    It is a ``DeviceLearner`` and a ``DeviceRemembering``, and so may its sources be.
    """

    def __init__(self, options: UnionOptions):
        methods = [(find_method(source.method), source) for source in options.sources]
        self._has_model = any(method.model is not None for method, _ in methods)
        self._sources = [method.make_on_device(source) for method, source in methods if method.model is None]
        self._num_nodes, self.learner = options.num_speculative_tokens, MergeLearner(len(methods))
        self._merging: Merging | None = None  # the widths of drafts are known at the first call

    def propose(self, context: DeviceDraftContext) -> Draft:
        """Draft one tree per request."""
        drafts = [context.draft_by_model()] if self._has_model else []
        drafts += [source.propose(context) for source in self._sources]
        if self._merging is None:
            self._merging = Merging.make(self.learner.calibration.weights, drafts, len(context.token_ids))
        return merge_drafts(drafts, self._num_nodes, self._merging)

    def finish(self, ended: EndedRequest) -> None:
        for source in self._sources:
            if isinstance(source, DeviceRemembering):
                source.finish(ended)

    # ---- learning

    @property
    def _learners(self) -> list[DeviceLearner]:
        return [source for source in self._sources if isinstance(source, DeviceLearner)]

    def drafted(self) -> tuple[torch.Tensor, ...]:
        merging = self._merging
        if merging is None:
            return ()
        of_sources = [values for source in self._learners for values in source.drafted()]
        return (merging.token_ids, merging.parents, merging.log_values, *of_sources)

    def tables(self) -> list[tuple[np.ndarray, torch.Tensor]]:
        own = [] if self._merging is None else [(self.learner.calibration.weights, self._merging.weights)]
        return own + [table for source in self._learners for table in source.tables()]

    def learn(self, drafted: Sequence[torch.Tensor], outcome: LateOutcome) -> None:
        own, rest = drafted[:3], list(drafted[3:])
        drafts = []
        for token_ids, parents, log_values in zip(
            *(values.split(self._merging.widths, dim=1) for values in own), strict=True
        ):
            drafts.append(Draft(from_flat(token_ids, parents, 1 + (parents >= 0).sum(dim=1)), log_values))
        num_reqs = len(own[0])
        valued = self.learner.value(merge(drafts, num_reqs), np.zeros((num_reqs, len(drafts))))
        self.learner.learn(valued, *outcome.arguments())
        for source in self._learners:
            count = len(source.drafted())
            source.learn(rest[:count], outcome)
            del rest[:count]


def merge_drafts(drafts: Sequence[Draft], num_nodes: int, merging: Merging) -> Draft:
    """Merge drafts in a few launches; keep them in ``merging``."""
    trees = [draft.tree for draft in drafts]
    rows = slice(trees[0].token_ids.shape[0])
    token_ids, parents, log_values = merging.token_ids[rows], merging.parents[rows], merging.log_values[rows]
    torch.cat([tree.token_ids for tree in trees], dim=1, out=token_ids)
    torch.cat([tree.parents for tree in trees], dim=1, out=parents)
    torch.cat([draft.log_values for draft in drafts], dim=1, out=log_values)
    pool = merged_pool(
        token_ids,
        torch.cat([tree.depths for tree in trees], dim=1),
        parents,
        log_values,
        _kernel_columns(merging.widths, token_ids.device),
        max(merging.widths),
        merging.weights,
        _kernel_limit(token_ids.device),
    )
    return rerank_draft(pool, trees[0].token_ids[:, 0].contiguous(), num_nodes)[0]


@lru_cache(maxsize=16)
def _kernel_columns(widths: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return arguments of ``kernels.triton_union`` for drafts of these widths: source and first column of each."""
    lens, starts = torch.tensor(widths), torch.tensor([sum(widths[:source]) for source in range(len(widths))])
    columns = (torch.arange(len(widths)), starts)
    return tuple(values.repeat_interleave(lens).to(device, torch.int32) for values in columns)


@lru_cache(maxsize=16)
def _kernel_limit(device: torch.device) -> torch.Tensor:
    """Return the limit of log odds, float64 ``[1]`` on a device; cached, so that no call copies it again."""
    return torch.tensor([LOGIT_LIMIT], dtype=torch.float64, device=device)
