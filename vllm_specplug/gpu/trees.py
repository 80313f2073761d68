"""Trees on the device, by request slot: the V2 runner keeps them between draft phase and verification.

Nothing is read back to the CPU.  The buffers live as long as the runner, so that CUDA graphs can hold their addresses.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_specplug.core.layout import WORD_BITS, ancestor_bits, ancestor_mask
from vllm_specplug.core.step import StepPlan
from vllm_specplug.core.tree import depths_from_parents, valid_rows
from vllm_specplug.core.tree_rows import DeviceTreeRows
from vllm_specplug.gpu.kernels.step import stage_rows, store_trees
from vllm_specplug.types import PADDING, TokenTree


class DeviceTrees:
    """The trees of all request slots, and those of the current forward.

    Args:
        max_num_reqs: request slots.
        num_nodes: drafted nodes of a tree.
        max_depth: depth that no tree exceeds.
        max_num_tokens: rows of a forward.
        device: of all buffers.
    """

    def __init__(self, max_num_reqs: int, num_nodes: int, max_depth: int, max_num_tokens: int, device: torch.device):
        self.width, self.max_depth = num_nodes + 1, max_depth
        num_words = -(-self.width // WORD_BITS)
        # Before the first draft: children of the root, so that vLLM's placeholder drafts have valid positions.
        parents = torch.zeros(max_num_reqs, self.width, dtype=torch.int64, device=device)
        parents[:, 0] = PADDING
        full = torch.full((max_num_reqs,), self.width, device=device)
        self.parents, self.depths = parents, depths_from_parents(parents)
        self.slot_bits = ancestor_bits(ancestor_mask(TokenTree(parents, parents, self.depths, full), 1)).contiguous()
        self.context_lens = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self.tree_start, self.tree_lens = torch.zeros_like(self.context_lens), torch.zeros_like(self.context_lens)
        self.bits = torch.zeros(max_num_reqs, self.width, num_words, dtype=torch.int64, device=device)
        self.max_num_tokens, self._columns = max_num_tokens, torch.arange(self.width, device=device)
        #: The commit of the last walk; None before the first.
        self.plan: StepPlan | None = None
        self._flat_positions = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        #: Whether the current forward has trees, and its rows with padding; values on the CPU.
        self.staged, self.num_rows = False, 0

    def keep(self, tree_parents: torch.Tensor, slots: torch.Tensor) -> None:
        """Keep drafted trees: int64 ``[num_reqs, num_rows]`` parents for int ``[num_reqs]`` slots."""
        store_trees(tree_parents.contiguous(), slots, self.parents, self.depths, self.slot_bits, self.max_depth)

    # ---- before the forward

    def stage(self, input_batch: Any) -> DeviceTreeRows | None:
        """Rewrite the positions of tree rows (their slots were derived from the flat ones) and build the masks.

        Args:
            input_batch: vLLM's; its ``positions`` are changed in place.
        """
        self.staged = input_batch.num_draft_tokens > 0
        if not self.staged:
            return None
        self.num_rows = input_batch.num_tokens_after_padding
        num_drafts = np.asarray(input_batch.num_draft_tokens_per_req)
        self._flat_positions[: input_batch.num_tokens].copy_(input_batch.positions[: input_batch.num_tokens])
        stage_rows(
            input_batch.idx_mapping,
            input_batch.query_start_loc,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            self.depths,
            self.slot_bits,
            input_batch.positions,
            self.context_lens,
            self.tree_start,
            self.tree_lens,
            self.bits,
            input_batch.num_reqs_after_padding,
        )
        # vLLM puts requests with drafts first.  A request with rows before its tree's root is attended to as a whole.
        num_trees = int(np.count_nonzero(num_drafts))
        leading = bool(np.all(input_batch.num_scheduled_tokens[:num_trees] == num_drafts[:num_trees] + 1))
        leading = leading and not num_drafts[num_trees:].any()
        all_rows = leading and num_trees == len(num_drafts)
        return self._device_rows(
            input_batch.num_reqs_after_padding if all_rows or not leading else num_trees,
            int(num_drafts.max()) + 1,
            int(input_batch.seq_lens_cpu_upper_bound.numpy().max()),
            all_rows,
            uniform=leading and bool(np.all(num_drafts[:num_trees] == num_drafts.max())),
            num_tree_rows=int(num_drafts.sum()) + num_trees if leading and not all_rows else None,
        )

    def move_positions(self, input_batch: Any, positions: torch.Tensor) -> None:
        """Move M-RoPE positions, int64 ``[num_dims, >= num_tokens]``, as far as ``stage`` moved the plain ones."""
        if self.staged:
            rows = slice(input_batch.num_tokens)
            positions[:, rows] += input_batch.positions[rows] - self._flat_positions[rows]

    def stage_for_capture(self, num_reqs: int, width: int, max_model_len: int) -> DeviceTreeRows:
        """Stage trees of ``width`` rows without a context, to record a CUDA graph of ``num_reqs`` of them.

        A replica without requests replays it too, together with others that have some.
        """
        self.staged = False  # the positions stay
        self.context_lens.zero_()
        self.tree_start[:num_reqs].copy_(torch.arange(num_reqs, device=self.tree_start.device) * width)
        self.tree_lens.fill_(width)
        return self._device_rows(num_reqs, width, max_model_len, True, uniform=True)

    def _device_rows(
        self, num_reqs: int, max_query_len: int, max_context_len: int | None, all_rows: bool, **fields: Any
    ) -> DeviceTreeRows:
        start, lens = self.tree_start[:num_reqs], self.tree_lens[:num_reqs]
        return DeviceTreeRows(
            context_lens=self.context_lens[:num_reqs],
            query_start=start,
            query_lens=lens,
            tree_start=start,
            tree_lens=lens,
            bits=self.bits[:num_reqs],
            max_query_len=max_query_len,
            max_context_len=max_context_len,
            all_rows=all_rows,
            **fields,
        )

    # ---- after the forward

    def batch_tree(self, input_batch: Any, token_ids: torch.Tensor) -> TokenTree:
        """Return the trees of the forward, for walks in plain torch.

        Args:
            input_batch: vLLM's.
            token_ids: int ``[num_logits]``; the tokens of the sampled rows.
        """
        offsets = input_batch.cu_num_logits.long()
        num_rows = offsets[1:] - offsets[:-1]
        rows = (offsets[:-1].unsqueeze(1) + self._columns).clamp(max=token_ids.shape[0] - 1)
        valid = valid_rows(num_rows, self.width)
        return TokenTree(
            token_ids=token_ids[rows].long().masked_fill(~valid, PADDING),
            parents=self.parents[input_batch.idx_mapping].masked_fill(~valid, PADDING),
            depths=self.depths[input_batch.idx_mapping].masked_fill(~valid, 0),
            num_rows=num_rows,
        )

    def linearise(self, input_batch: Any) -> None:
        """Give the batch the token ids and positions of a chain draft of the accepted path, in place.

        vLLM's next forward (its drafter over the accepted rows) then needs no change.
        """
        if not self.staged:
            return
        num_tokens = input_batch.num_tokens
        ids = input_batch.input_ids[:num_tokens]
        ids.copy_(ids[self.plan.path_index[:num_tokens]])
        input_batch.positions[:num_tokens].copy_(self._flat_positions[:num_tokens])

    def last_rows(self, input_batch: Any) -> torch.Tensor:
        """Return the row whose logits gave each request's newest token, int64 ``[num_reqs]``."""
        if self.staged:
            return self.plan.last_rows
        return input_batch.query_start_loc[1 : input_batch.num_reqs + 1].long() - 1

    def in_path_order(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows ``[num_tokens, ...]`` of the last forward, the accepted ones first in each tree."""
        return rows[self.plan.path_index[: rows.shape[0]]] if self.staged else rows
