"""The host's EAGLE proposer, drafting trees: its model loading, paged KV and first forward; our growth."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.spec_decode.eagle import EagleProposer

from vllm_specplug.config import Eagle2Options
from vllm_specplug.hosts.attention import KvScratch, TreeAttentionMetadata, TreeRows
from vllm_specplug.hosts.draft_head import DraftHead
from vllm_specplug.proposers.eagle2.checkpoint import target_ids
from vllm_specplug.proposers.eagle2.drafting import DraftFeatures, grow_tree
from vllm_specplug.types import Draft


class TreeEagleProposer(EagleProposer):
    """EAGLE-2 (and EAGLE-3 heads in EAGLE-2 trees) on the host's paged draft KV.

    The first forward of a round is the host's own: it re-runs the drafter over the accepted
    tokens with the target's hidden states (stable KV).  The levels behind it keep their key/value
    in a scratch that is thrown away, so that drafting never touches committed pages.
    """

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any, options: Eagle2Options):
        super().__init__(vllm_config, device, runner)
        self.options = options
        #: int64 ``[num_flat_rows]``: which row of the last forward holds each flat row's accepted token.
        self.path_rows: torch.Tensor | None = None
        self._head: DraftHead | None = None
        self._draft_to_target: torch.Tensor | None = None
        self._first_pass: tuple[Any, ...] | None = None
        self._scratch: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    # ---- loading

    def load_model(self, target_model: torch.nn.Module) -> None:
        super().load_model(target_model)
        self.model.register_forward_hook(self._keep_output)
        layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase, list(self._draft_attn_layer_names))
        self.draft_layers = {name: layer.impl for name, layer in layers.items()}

    def _keep_output(self, _module: Any, _args: Any, output: Any) -> None:
        self._last_output = output

    def _maybe_share_lm_head(self, target_language_model: torch.nn.Module) -> None:
        super()._maybe_share_lm_head(target_language_model)
        d2t = getattr(self.model, "d2t", None)
        if d2t is None:
            d2t = getattr(self.model, "draft_id_to_target_id", None)
            if d2t is not None:  # EAGLE-3: a head of its own in the draft vocabulary
                self._draft_to_target = target_ids(d2t.data)
            return
        self._draft_to_target = target_ids(d2t)
        self._head = DraftHead(target_language_model.lm_head.weight.data[self._draft_to_target].contiguous())

    # ---- one round

    def prepare_inputs(self, common_attn_metadata, sampled_token_ids, num_draft_tokens):
        """The host's selection of accepted rows as a flat prefix, turned into path rows.

        Slots stay those of the flat prefix, where the accepted key/value has been moved to.
        """
        metadata, token_indices = super().prepare_inputs(common_attn_metadata, sampled_token_ids, num_draft_tokens)
        assert self.path_rows is not None
        return metadata, self.path_rows[token_indices]

    def set_inputs_first_pass(self, *args: Any, **kwargs: Any):
        self._first_pass = super().set_inputs_first_pass(*args, **kwargs)
        return self._first_pass

    def propose(self, **kwargs: Any) -> Draft:  # type: ignore[override]
        """Draft one tree per request, where the host drafts a chain."""
        # With no tokens to draft, the host's propose is just the re-seeding forward.
        super().propose(**{**kwargs, "num_speculative_tokens": 0})
        self.num_speculative_tokens = self.speculative_config.num_speculative_tokens
        assert self._first_pass is not None
        _, rows, metadata = self._first_pass
        score, feed = self._last_output
        positions = self.positions[rows]
        level = _Levels(self, positions, metadata.block_table_tensor)
        return grow_tree(
            kwargs["next_token_ids"].long(),
            DraftFeatures(score[rows], feed[rows]),
            self._score,
            level.forward,
            num_nodes=self.options.num_speculative_tokens,
            draft_depth=self.options.draft_depth,
            draft_top_k=self.options.draft_top_k,
            min_node_value=self.options.min_node_value,
            min_level_value=self.options.min_level_value,
        )

    def _score(self, hidden: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._head is not None:
            logits = self._head(hidden)
        elif self._draft_to_target is not None:
            logits = self.model.logits_processor(self.model.lm_head, hidden)
        else:
            logits = self.model.compute_logits(hidden)
        # One fused pass; logsumexp of a converted copy takes several times as long here.
        log_probs, token_ids = torch.log_softmax(logits, dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
        if self._draft_to_target is not None:
            token_ids = self._draft_to_target[token_ids]
        return token_ids, log_probs

    def scratch(self, num_reqs: int, level: int) -> dict[str, KvScratch]:
        """Scratch of every draft layer for the nodes fed at ``level``, allocated on first use."""
        top_k, capacity = self.options.draft_top_k, self.scratch_capacity
        requests = torch.arange(num_reqs).unsqueeze(1) * capacity
        rows = (requests + torch.arange(level * top_k, (level + 1) * top_k)).flatten()
        result = {}
        for name, impl in self.draft_layers.items():
            key, value = self._scratch.get(name, (None, None))
            if key is None or key.shape[0] < num_reqs * capacity:
                shape = (num_reqs * capacity, impl.num_kv_heads, impl.head_size)
                key, value = torch.zeros(shape, dtype=self.dtype), torch.zeros(shape, dtype=self.dtype)
                self._scratch[name] = (key, value)
            result[name] = KvScratch(key, value, rows)
        return result

    @property
    def scratch_capacity(self) -> int:
        """Nodes that one request feeds in a round."""
        return self.options.draft_top_k * max(self.options.draft_depth - 1, 1)


class _Levels:
    """The drafter forwards of one round behind the first."""

    def __init__(self, proposer: TreeEagleProposer, positions: torch.Tensor, block_table: torch.Tensor):
        self.proposer = proposer
        self.positions = positions
        num_reqs = positions.shape[0]
        self.block_table = block_table[:num_reqs]
        self.context_lens = (positions + 1).to(torch.int32)
        self.requests = torch.arange(num_reqs, dtype=torch.int32)

    def forward(self, level: int, token_ids: torch.Tensor, features: torch.Tensor, mask: torch.Tensor) -> DraftFeatures:
        proposer = self.proposer
        num_reqs, width = token_ids.shape
        num_tokens = num_reqs * width
        tree = TreeRows(
            block_table=self.block_table,
            context_lens=self.context_lens,
            query_start=self.requests * width,
            query_lens=torch.full_like(self.requests, width),
            tree_start=self.requests * proposer.scratch_capacity,
            tree_lens=torch.full_like(self.requests, mask.shape[2]),
            mask=mask,
            all_rows=True,
            scratch=proposer.scratch(num_reqs, level),
        )
        metadata = TreeAttentionMetadata(
            num_actual_tokens=num_tokens,
            max_query_len=width,
            query_start_loc=tree.query_start,
            max_seq_len=0,
            seq_lens=tree.context_lens,
            block_table=tree.block_table,
            slot_mapping=tree.query_start,
            scheduler_metadata=None,
            tree=tree,
        )
        # All nodes of a level share a position; near max_model_len the last ones cannot be emitted anyway.
        positions = (self.positions + level + 1).clamp(max=proposer.max_model_len - 1).repeat_interleave(width)
        with set_forward_context(
            dict.fromkeys(proposer.draft_layers, metadata),
            proposer.vllm_config,
            num_tokens=num_tokens,
            slot_mapping={},
        ):
            score, feed = proposer.model(
                input_ids=token_ids.flatten().to(torch.int32),
                positions=positions,
                hidden_states=features.flatten(0, 1),
                inputs_embeds=None,
            )
        return DraftFeatures(score.unflatten(0, (num_reqs, width)), feed.unflatten(0, (num_reqs, width)))
