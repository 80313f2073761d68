"""DFlash, DFlash 2 and DSpark on the V2 runner: vLLM's model and paged KV of the context; trees of the best paths."""

from __future__ import annotations

from typing import Any

import torch
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.dflash.utils import load_dflash_model
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

from vllm_specplug.config import ConfigError
from vllm_specplug.gpu.drafters.base import TreeSpeculator
from vllm_specplug.gpu.drafters.blocks import BestPaths, BlockRows
from vllm_specplug.proposers.dflash.drafting import WIDTH
from vllm_specplug.types import Draft
from vllm_specplug.vllm.drafters.block_head import BlockHead
from vllm_specplug.vllm.drafters.eagle_levels import LevelScratch
from vllm_specplug.vllm.drafters.setup import target_info
from vllm_specplug.vllm.drafters.target_parts import TargetParts
from vllm_specplug.vllm.proof.driver import attributes


class TreeDFlashSpeculator(BestPaths, TreeSpeculator, DFlashSpeculator):
    """A head that reads the target's hidden states as its context, and predicts a block of positions in one forward.

    The keys and values of the context come from the accepted path's hidden states and go to the pages.  Those of the
    block, the root and a mask token for each position, stay in a scratch: each row sees the context and, unless the
    head is causal, the whole block.
    """

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any):
        super().__init__(vllm_config, device)
        self.init_trees(vllm_config, device, req_states)
        self._rows: BlockRows | None = None
        self._has_cache = True

    # ---- loading

    def load_draft_model(self, target_model: torch.nn.Module, target_attn_layer_names: set[str]) -> torch.nn.Module:
        assert self.options.draft_depth is not None
        parts = TargetParts(target_model, target_info(self.vllm_config.model_config))
        with attributes(self.speculative_config, num_speculative_tokens=self.options.draft_depth):  # rows of a block
            model = _load(parts, self.vllm_config, self.method)
        self._head = BlockHead(model)
        self._size = self.options.scratch_rows - self._head.predicts_at_root
        most = max(self._size, WIDTH)
        if most > self.max_num_tokens:
            raise ConfigError(
                f"a draft of {self.options.model!r} has {most} rows, which do not fit in max_num_batched_tokens="
                f"{self.max_num_tokens}: use a larger one"
            )
        rows = min(self.max_num_tokens, get_max_chunk_logits(self.vocab_size))
        self._at_once = max(1, min(self.max_num_reqs, rows // most))
        for growth in self._growths.values():
            growth.at_once = min(growth.at_once, self._at_once)
        return model

    def capture(self) -> None:
        if self._records:  # the block's forward and the growth; the context is written without graphs
            self._has_cache = True  # vLLM may capture before the first draft phase on the cache
            self.draft_max_seq_len = self.max_model_len  # bounds the splits of the recorded kernels
            table = self._empty_block_table()
            self._record(table, table.new_zeros(self.max_num_reqs, dtype=torch.int64))

    # ---- one draft phase

    @torch.inference_mode()
    def draft_trees(
        self,
        input_batch: Any,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        *_: Any,
        dummy_run: bool = False,
        **__: Any,
    ) -> torch.Tensor:
        self._read(input_batch, slot_mappings, last_hidden_states, aux_hidden_states, dummy_run)
        num_reqs, self._has_cache = input_batch.num_reqs, attn_metadata is not None
        longest = int(input_batch.seq_lens_cpu_upper_bound[:num_reqs].max())  # in CPU memory
        self.draft_max_seq_len = min(longest + self._size, self.max_model_len)
        block_table = self._block_table(attn_metadata, num_reqs)
        root_positions = input_batch.seq_lens[:num_reqs].long() - num_rejected[:num_reqs]
        return self._draft(input_batch, dummy_run, last_sampled, block_table, root_positions)

    @torch.inference_mode()
    def keep_up(
        self,
        input_batch: Any,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        """Write the key/value of the step's tokens, so that a later round can draft."""
        self._read(input_batch, slot_mappings, last_hidden_states, aux_hidden_states, dummy_run=False)
        return self.draft_nothing(input_batch)

    def _read(
        self,
        input_batch: Any,
        slot_mappings: dict[str, torch.Tensor] | None,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        dummy_run: bool,
    ) -> None:
        """Write the keys and values of the step's rows; those of rejected drafts are overwritten later."""
        hidden = torch.cat(aux_hidden_states, dim=-1) if aux_hidden_states else last_hidden_states
        if not dummy_run:
            self.trees.linearise(input_batch)
            hidden = self.trees.in_path_order(hidden)
        rows = slice(input_batch.num_tokens)
        context, slots = self.model.combine_hidden_states(hidden)[rows], None
        if slot_mappings and not dummy_run:
            slots = slot_mappings[next(iter(self.draft_attn_layer_names))][rows]
        self.model.precompute_and_store_context_kv(context, input_batch.positions[rows], slots)

    def _draft_by_model(
        self, slots: torch.Tensor, root_token_ids: torch.Tensor, block_table: torch.Tensor, root_positions: torch.Tensor
    ) -> Draft:
        if self._rows is None:  # allocated once, for all requests: recorded graphs hold its addresses
            scratch = LevelScratch(self.vllm_config, self.draft_attn_layer_names, self._size, self.device)
            self._rows = BlockRows(scratch, self._size, self._at_once, not self.requires_non_causal, self.device)
        context_lens = root_positions.masked_fill(slots < 0, 0).to(torch.int32)
        metadata = self._rows.metadata(block_table, context_lens, self.draft_max_seq_len) if self._has_cache else None
        hidden = self._predict(root_token_ids, root_positions, metadata)
        self._head.read(hidden)
        logits_after = self._head.logits_after if self._head.is_pairwise else self._head.logits()
        return self._best_paths(root_token_ids, hidden.shape[1], logits_after, self._head.draft_ids)

    def _predict(self, root_token_ids: torch.Tensor, root_positions: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Run the head over the blocks: hidden states ``[num_reqs, num_positions, hidden_size]``."""
        shape = (len(root_token_ids), self._size)
        token_ids = torch.full(shape, self.parallel_drafting_token_id, dtype=torch.int32, device=self.device)
        token_ids[:, 0] = root_token_ids
        # Near max_model_len the last positions cannot be emitted anyway.
        columns = torch.arange(self._size, device=self.device)
        positions = (root_positions.unsqueeze(1) + columns).clamp(max=self.max_model_len - 1)
        layers = None if metadata is None else dict.fromkeys(self.draft_attn_layer_names, metadata)
        with set_forward_context(layers, self.vllm_config, num_tokens=token_ids.numel(), slot_mapping={}):
            hidden = self.model(input_ids=token_ids.flatten(), positions=positions.flatten(), inputs_embeds=None)
        hidden = hidden.unflatten(0, shape)
        return hidden if self._head.predicts_at_root else hidden[:, 1:]


def _load(parts: TargetParts, vllm_config: Any, method: str) -> torch.nn.Module:
    """Load a head by vLLM's own loader of its method."""
    if method != "dspark":
        return load_dflash_model(parts, vllm_config)
    from vllm.v1.worker.gpu.spec_decode.dspark.utils import load_dspark_model

    return load_dspark_model(parts, vllm_config)
