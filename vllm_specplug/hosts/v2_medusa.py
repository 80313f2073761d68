"""Medusa heads in place of a V2 speculator of the host: one product per round, no draft model, no KV of its own."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_specplug.hosts.medusa_heads import HostMedusaHeads
from vllm_specplug.hosts.v2_drafter import TreeSpeculator


class TreeMedusaSpeculator(TreeSpeculator, BaseSpeculator):
    """Drafts from the target's hidden state at the last accepted row: a row of the walked path, no flat prefix."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, vllm_config: Any, device: torch.device):
        self.init_trees(vllm_config, device)
        self.draft_attn_layer_names: set[str] = set()
        self._heads = HostMedusaHeads(vllm_config)
        self._hidden_size = vllm_config.model_config.get_hidden_size()
        self._max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self._dtype, self._device = vllm_config.model_config.dtype, device
        self._records = False

    def load_heads(self, target_model: torch.nn.Module) -> None:
        self._heads.load(target_model)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        self._records = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL

    def capture(self) -> None:
        if self._records:
            roots = torch.zeros(self._max_num_reqs, dtype=torch.int64, device=self._device)
            hidden = torch.zeros(self._max_num_reqs, self._hidden_size, dtype=self._dtype, device=self._device)
            self._growth.record(roots, hidden)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        *args: Any,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Draft one tree per request.

        Returns:
            int64 ``[num_reqs, num_speculative_tokens]``; the nodes' tokens.  Their parents are kept in ``trees``.
        """
        rows = input_batch.query_start_loc[1 : input_batch.num_reqs + 1].long() - 1 - num_rejected
        if not dummy_run:
            rows = self.trees.accepted_rows(rows)
        roots = last_sampled[input_batch.idx_mapping].view(-1)
        return self._draft(input_batch, dummy_run, roots, last_hidden_states[rows])

    def _grow(self, num_reqs: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tree = self._heads.draft(*inputs).tree
        return tree.token_ids, tree.parents
