"""DFlash on the V1 runner: vLLM's model and paged KV of the context; a tree from the distributions of all positions."""

from __future__ import annotations

from typing import Any

import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.dflash import DFlashProposer

from vllm_specplug.core.draft_sampling import Children
from vllm_specplug.core.marginals import best_first_tree
from vllm_specplug.cpu.attention import level_metadata
from vllm_specplug.cpu.drafters.levels import LevelDrafter, plain_positions
from vllm_specplug.cpu.kernels.likeliest import likeliest
from vllm_specplug.types import Draft
from vllm_specplug.vllm.drafters.setup import target_info
from vllm_specplug.vllm.drafters.target_parts import TargetParts

#: Likeliest tokens of a position that can be nodes.
CANDIDATES = 16


class TreeDFlashProposer(LevelDrafter, DFlashProposer):
    """A head that reads the target's hidden states as its context, and predicts a block of positions in one forward.

    The keys and values of the context come from the accepted path's hidden states and go to the pages.  Those of the
    block, the root and a mask token for each position, stay in a scratch: each row sees the context and, unless the
    head is causal, the whole block.
    """

    grows_by_level = False

    def load_model(self, target_model: torch.nn.Module) -> None:
        super().load_model(TargetParts(target_model, target_info(self.vllm_config.model_config)))
        size = self.options.scratch_rows
        block = torch.ones(size, size, dtype=torch.bool)
        self._mask = block.tril() if self.dflash_causal else block

    def _read(
        self,
        target_hidden_states: torch.Tensor,
        target_positions: torch.Tensor,
        common_attn_metadata: CommonAttentionMetadata,
        **_: Any,
    ) -> None:
        """Write the keys and values of context rows."""
        positions = plain_positions(target_positions)
        context = self.model.combine_hidden_states(target_hidden_states)
        slots = common_attn_metadata.slot_mapping[: len(context)]
        self.model.precompute_and_store_context_kv(context, positions, slots)

    def propose(self, next_token_ids: torch.Tensor, **kwargs: Any) -> Draft:  # type: ignore[override]
        """Draft one tree per request; vLLM would draft a chain."""
        self._read(**kwargs)
        metadata = kwargs["common_attn_metadata"]
        last = plain_positions(kwargs["target_positions"])[metadata.query_start_loc[1:].long() - 1]
        hidden = self._predict(next_token_ids, last + 1, metadata.seq_lens, metadata.block_table_tensor)
        children = self._children(hidden)
        draft = best_first_tree(
            next_token_ids.long(),
            children.token_ids.unflatten(0, hidden.shape[:2]),
            children.log_probs.unflatten(0, hidden.shape[:2]),
            self.options.num_speculative_tokens,
            self.options.node_floor,
        )
        return self._without_unread(draft)

    def _predict(
        self,
        root_token_ids: torch.Tensor,
        root_positions: torch.Tensor,
        context_lens: torch.Tensor,
        block_table: torch.Tensor,
    ) -> torch.Tensor:
        """Run the head over the blocks: hidden states ``[num_reqs, num_positions, hidden_size]`` of the mask tokens."""
        num_reqs, size = len(root_token_ids), self.options.scratch_rows
        token_ids = torch.full((num_reqs, size), self.parallel_drafting_token_id, dtype=torch.int32)
        token_ids[:, 0] = root_token_ids
        # Near max_model_len the last positions cannot be emitted anyway.
        positions = (root_positions.unsqueeze(1) + torch.arange(size)).clamp(max=self.max_model_len - 1)
        starts, rows = self._scratch.places(num_reqs, size, 0)
        scratch = self._scratch.scratch.at(rows, num_reqs * size)
        mask = self._mask.expand(num_reqs, -1, -1)
        metadata = level_metadata(block_table[:num_reqs], context_lens, starts, mask, scratch)
        with set_forward_context(
            dict.fromkeys(self._scratch.layer_names, metadata),
            self.vllm_config,
            num_tokens=token_ids.numel(),
            slot_mapping={},
        ):
            hidden = self.model(input_ids=token_ids.flatten(), positions=positions.flatten(), inputs_embeds=None)
        return hidden.unflatten(0, token_ids.shape)[:, 1:]

    def _children(self, hidden: torch.Tensor) -> Children:
        """Choose the tokens of each position: ``[num_reqs * num_positions, num_candidates]``."""
        num_reqs, num_positions, _ = hidden.shape
        logits = self.model.compute_logits(hidden.flatten(0, 1))
        top_k = min(self.options.num_speculative_tokens, CANDIDATES, logits.shape[1])
        sampling = self.runner.draft_noise.sampling(num_positions, 1)
        if sampling is None:
            return likeliest(logits, top_k, None)
        levels = logits.unflatten(0, (num_reqs, num_positions))
        sampled = [sampling.children(levels[:, level], level, top_k) for level in range(num_positions)]
        token_ids, log_probs = zip(*((one.token_ids, one.log_probs) for one in sampled), strict=True)
        return Children(torch.stack(token_ids, 1).flatten(0, 1), torch.stack(log_probs, 1).flatten(0, 1))
