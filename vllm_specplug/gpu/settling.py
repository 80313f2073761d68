"""Typical acceptance and rejection on the V2 runner: tokens that are chosen before the exact walk, on the device.

The chosen tokens replace what vLLM's sampler drew at their rows.  The walk then continues exactly after them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import _iter_request_chunks, get_max_chunk_logits

from vllm_specplug.core.noise import derived_seeds, uniform_noise
from vllm_specplug.core.rejection import accept_rejection
from vllm_specplug.core.typical import accept_typical_nodes, path_token_ids, threshold
from vllm_specplug.core.walk import settled_rows
from vllm_specplug.gpu.draft_sampling import TRIED, Proposals
from vllm_specplug.gpu.slot_params import SlotParams
from vllm_specplug.gpu.trees import DeviceTrees
from vllm_specplug.types import TokenTree


@dataclass(frozen=True)
class VerifiedRows:
    """The sampled rows of a forward.

    Attributes:
        logits: float ``[num_logits, vocab_size]``.
        batch: vLLM's ``InputBatch``.
        token_ids: int ``[num_logits]``; the rows' own tokens; negative: they match nothing.
        pos: int64 ``[num_logits]``; their positions.
    """

    logits: torch.Tensor
    batch: Any
    token_ids: torch.Tensor
    pos: torch.Tensor


class Settling(ABC):
    """Chooses the first tokens of requests.

    Args:
        params: of all requests.
        trees: the staged trees.
        sampler: vLLM's, whose distributions are verified.
    """

    def __init__(self, params: SlotParams, trees: DeviceTrees, sampler: Any):
        self.params, self.trees, self.sampler = params, trees, sampler

    def __call__(self, rows: VerifiedRows) -> torch.Tensor | None:
        """Return int64 ``[num_reqs, num_rows]``: the token to emit at each row, ``PADDING`` where it is sampled; None
        if all are."""
        active = self.params.settles[rows.batch.idx_mapping_np] & self.can_settle(
            np.asarray(rows.batch.num_draft_tokens_per_req)
        )
        if not active.any():
            return None
        tree = self.trees.batch_tree(rows.batch, rows.token_ids)
        return settled_rows(tree, self.settle(tree, rows, async_tensor_h2d(active, device=rows.logits.device)))

    @abstractmethod
    def can_settle(self, num_nodes: np.ndarray) -> np.ndarray:
        """Return bool ``[num_reqs]`` for trees of int ``[num_reqs]`` scheduled nodes."""

    @abstractmethod
    def settle(self, tree: TokenTree, rows: VerifiedRows, active: torch.Tensor) -> torch.Tensor:
        """Choose the first tokens of the active requests: int64 ``[num_reqs, any width]``, ``PADDING`` after them."""


class TypicalSettling(Settling):
    """Accepts what ``core.typical`` accepts."""

    def can_settle(self, num_nodes: np.ndarray) -> np.ndarray:
        return num_nodes > 0

    def settle(self, tree: TokenTree, rows: VerifiedRows, active: torch.Tensor) -> torch.Tensor:
        values, offsets = self._values(rows), rows.batch.cu_num_logits[:-1].long()
        columns = torch.arange(self.trees.width, device=offsets.device)
        at = (offsets.unsqueeze(1) + columns).clamp(max=rows.logits.shape[0] - 1)
        child_log_probs, limits = (of_row[at] for of_row in values)
        last_rows = accept_typical_nodes(tree, child_log_probs, limits, active, self.trees.max_depth)
        return path_token_ids(tree, last_rows, self.trees.max_depth)

    def _values(self, rows: VerifiedRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probability and limit of each row's token, at its parent: float32 ``[num_logits]`` each.

        By chunks of requests, as vLLM bounds its copies of logits.
        """
        batch, offsets, found = rows.batch, rows.batch.cu_num_logits_np, []
        for first, last in _iter_request_chunks(offsets, get_max_chunk_logits(rows.logits.shape[1])):
            part, requests = slice(int(offsets[first]), int(offsets[last])), slice(first, last)
            slots, local = batch.expanded_idx_mapping[part], batch.expanded_local_pos[part]
            log_probs = self.sampler.apply_sampling_params(
                rows.logits[part],
                slots,
                batch.idx_mapping[requests],
                batch.idx_mapping_np[requests],
                rows.pos[part],
                rows.token_ids[part],
                local,
                batch.seq_lens_cpu_upper_bound.numpy()[requests],
            ).log_softmax(dim=-1, dtype=torch.float32)
            limits = threshold(log_probs, *self.params.limits(slots))
            local = local.long()
            parents = self.trees.parents[slots.long(), local].clamp(min=0)
            parents = torch.arange(len(local), device=local.device) - local + parents
            found.append((log_probs[parents, rows.token_ids[part].long().clamp(min=0)], limits[parents]))
        log_probs, limits = zip(*found, strict=True)
        return torch.cat(log_probs), torch.cat(limits)


class RejectionSettling(Settling):
    """Walks trees that were drawn from ``proposals`` by ``core.rejection``.

    Args:
        proposals: by slot.
        num_children: most children of a node.
    """

    def __init__(self, *args: Any, proposals: Proposals, num_children: int):
        super().__init__(*args)
        self.proposals, self.num_children = proposals, num_children

    def can_settle(self, num_nodes: np.ndarray) -> np.ndarray:
        # Near the end of the context trees are cut.  Where depends on the tokens, which would bias the output.
        return num_nodes == self.trees.width - 1

    def settle(self, tree: TokenTree, rows: VerifiedRows, active: torch.Tensor) -> torch.Tensor:
        batch, first = rows.batch, rows.batch.cu_num_logits[:-1].long()
        proposal = self.proposals.of(batch.idx_mapping)
        if proposal is None:  # nothing was drafted yet
            return tree.token_ids.new_empty(len(first), 0)

        def target_probs(at: torch.Tensor) -> torch.Tensor:
            flat = first + at
            return self.sampler.apply_sampling_params(
                rows.logits[flat],
                batch.idx_mapping,
                batch.idx_mapping,
                batch.idx_mapping_np,
                rows.pos[flat],
                rows.token_ids[flat],
                torch.zeros_like(batch.idx_mapping),
                batch.seq_lens_cpu_upper_bound.numpy(),
            ).softmax(dim=-1, dtype=torch.float32)

        shape = (self.trees.max_depth, self.num_children + 1)
        numbers = torch.arange(shape[0] * shape[1], device=first.device).view(shape)
        seeds = derived_seeds(self.params.seeds(batch.idx_mapping), TRIED, rows.pos[first])
        uniform = uniform_noise(seeds.view(-1, 1, 1), numbers)
        return accept_rejection(tree, proposal, target_probs, uniform, active, self.trees.max_depth)
