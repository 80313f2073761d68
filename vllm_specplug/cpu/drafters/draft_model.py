"""A small model as drafter on the V1 runner: vLLM's class and paged KV; trees level by level."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.draft_model import DraftModelProposer

from vllm_specplug.config import ConfigError
from vllm_specplug.cpu.drafters.catch_up import MissedRows
from vllm_specplug.cpu.drafters.levels import LevelDrafter, slots_of
from vllm_specplug.types import Draft
from vllm_specplug.vllm.drafters.draft_model import DraftModelScorer
from vllm_specplug.vllm.kv_groups import groups_by_layer

#: Of a row whose key/value is not written.
NO_SLOT = -1


class TreeDraftModelProposer(LevelDrafter, DraftModelProposer):
    """A model that reads tokens alone: the accepted ones, each at its own place, and the last emitted one.

    The key/value of the last emitted token, the root, goes to the slot in which the next step verifies it; that step's
    draft phase writes it again.
    """

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any):
        super().__init__(vllm_config, device, runner)
        # One row of each request is its root.
        self.missed = MissedRows(max(self.max_num_tokens - self.max_batch_size, 0))
        self.supports_mm_inputs = False

    def _raise_if_padded_drafter_batch_disabled(self) -> None:
        """Accept it: ``set_inputs_first_pass`` reads the accepted rows alone."""

    def _warn_if_multimodal(self) -> None:
        """Say nothing: the drafter reads the tokens that stand for images too."""

    def load_model(self, target_model: torch.nn.Module) -> None:
        super().load_model(torch.nn.Module())  # nothing is shared with the target
        mapping = getattr(self, "vocab_mapping", None)  # older versions of vLLM have none
        self._scorer = DraftModelScorer(self.model, self.vllm_config, mapping)

    def validate_same_kv_cache_group(self, kv_cache_config: Any) -> None:
        """Refuse a drafter whose layers have several block tables.

        Raises:
            ConfigError: with the fix.
        """
        if len({group for name, group in groups_by_layer(kv_cache_config).items() if name in self.draft_layers}) > 1:
            raise ConfigError(
                f"method {self.options.method!r}: vLLM keeps layers of the drafter {self.options.model!r} in several "
                "KV cache groups, because some have a sliding window: start with --disable-hybrid-kv-cache-manager, or "
                "use another drafter"
            )

    def _forward(self, input_ids: torch.Tensor, hidden_states: torch.Tensor | None = None, **inputs: Any) -> Any:
        return self.model(input_ids=self._scorer.known(input_ids), **inputs)

    def _logits(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._scorer.logits(hidden), self._scorer.draft_ids

    def skip_draft(self, hidden_states: torch.Tensor, *args: Any) -> None:
        super().skip_draft(hidden_states[:, :0], *args)  # it reads none

    def propose(self, common_attn_metadata: CommonAttentionMetadata, **kwargs: Any) -> Draft:  # type: ignore[override]
        """Draft one tree per request; vLLM gives the block table of the target's first KV cache group."""
        table = self.runner.input_batch.block_table[self.kv_cache_gid]
        own = table.get_device_tensor(common_attn_metadata.num_reqs)
        return super().propose(common_attn_metadata=replace(common_attn_metadata, block_table_tensor=own), **kwargs)

    def set_inputs_first_pass(
        self,
        target_token_ids: torch.Tensor,
        next_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        token_indices_to_sample: torch.Tensor | None,
        cad: CommonAttentionMetadata,
        num_rejected_tokens_gpu: torch.Tensor | None,
    ) -> tuple[int, torch.Tensor, CommonAttentionMetadata]:
        """Put the next token after the accepted ones of each request."""
        lens = torch.diff(cad.query_start_loc).long() + 1
        ends = lens.cumsum(0)
        roots, num_rows = ends - 1, int(ends[-1])
        requests = torch.repeat_interleave(lens)
        is_root = torch.zeros(num_rows, dtype=torch.bool)
        is_root[roots] = True
        token_ids = self._scorer.known(target_token_ids), self._scorer.known(next_token_ids)
        self.input_ids[:num_rows][~is_root], self.input_ids[roots] = (one.to(torch.int32) for one in token_ids)
        places = (cad.seq_lens.long() + 1 - ends)[requests] + torch.arange(num_rows)
        self.positions[:num_rows] = places.clamp(max=self._scorer.max_position)
        last = self.max_model_len - 1  # a request that ends there has no slot for its root
        block_size = self.runner.input_batch.block_table[self.kv_cache_gid].block_size
        slots = slots_of(places.clamp(max=last), cad.block_table_tensor[requests], block_size)
        metadata = replace(
            cad,
            query_start_loc=torch.cat([ends.new_zeros(1), ends]).to(torch.int32),
            query_start_loc_cpu=torch.cat([ends.new_zeros(1), ends]).to(torch.int32),
            seq_lens=(cad.seq_lens + 1).clamp(max=last + 1),
            seq_lens_cpu_upper_bound=(cad.seq_lens + 1).clamp(max=last + 1),
            num_actual_tokens=num_rows,
            max_query_len=cad.max_query_len + 1,
            max_seq_len=min(cad.max_seq_len + 1, last + 1),
            slot_mapping=slots.masked_fill(places > last, NO_SLOT),
        )
        self._first_pass = num_rows, roots, metadata
        return self._first_pass

    def run_forward(self, num_rows: int, is_first: bool) -> None:
        with set_forward_context(None, self.vllm_config, num_tokens=num_rows):
            hidden = self.model(
                input_ids=self.input_ids[:num_rows], positions=self.positions[:num_rows], inputs_embeds=None
            )
        if not is_first:
            self._score(hidden, self.options.draft_top_k)
