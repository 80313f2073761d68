"""The host's V2 EAGLE speculator, drafting trees: its model loading, paged KV and first forward; our growth."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from vllm_specplug.config import Eagle2Options
from vllm_specplug.core.draft_sampling import Children, likeliest
from vllm_specplug.core.kv import DraftScratch, KvScratch
from vllm_specplug.hosts.attention.paged import level_metadata
from vllm_specplug.hosts.drafters.base_v2 import TreeSpeculator
from vllm_specplug.hosts.drafters.draft_head import DraftHead
from vllm_specplug.proposers.eagle2.checkpoint import target_ids
from vllm_specplug.proposers.eagle2.drafting import DraftFeatures, grow_tree
from vllm_specplug.types import Draft


class TreeEagleSpeculator(TreeSpeculator, EagleSpeculator):
    """EAGLE-2 (and EAGLE-3 heads in EAGLE-2 trees).

    The first forward of a round is the host's own: it re-runs the drafter over the accepted tokens with the target's
    hidden states (stable KV), on rows that were brought into path order.  The levels behind it keep their key/value in
    a scratch that is thrown away.
    """

    options: Eagle2Options

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any):
        super().__init__(vllm_config, device)
        self.init_trees(vllm_config, device, req_states)
        #: What goes to the LM head for each request's newest token; ``hidden_states`` holds what its children are fed.
        self.root_scores = torch.zeros(self.max_num_reqs, self.hidden_size, dtype=self.dtype, device=device)
        self._draft_head: DraftHead | None = None
        self._draft_to_target: torch.Tensor | None = None
        self._scratch: DraftScratch | None = None

    # ---- loading

    def load_draft_model(self, target_model: torch.nn.Module, target_attn_layer_names: set[str]) -> torch.nn.Module:
        model = super().load_draft_model(target_model, target_attn_layer_names)
        d2t = getattr(model, "d2t", None)
        if d2t is not None:
            self._draft_to_target = target_ids(d2t).to(self.device)
            self._draft_head = DraftHead(model.lm_head.weight.data[self._draft_to_target].contiguous())
        elif (d2t := getattr(model, "draft_id_to_target_id", None)) is not None:  # EAGLE-3: a head of its own
            self._draft_to_target = target_ids(d2t.data).to(self.device)
        return model

    def capture(self) -> None:
        # Only the first forward is the host's; its graphs for chains would never run.
        steps, self.num_speculative_steps = self.num_speculative_steps, 1
        try:
            super().capture()
        finally:
            self.num_speculative_steps = steps
        if self.decode_cudagraph_manager is not None and self.decode_cudagraph_manager.needs_capture():
            self.draft_max_seq_len = self.max_model_len  # bounds the splits of what is recorded
            width = self.block_tables.input_block_tables[0].shape[1]
            self._record(torch.zeros(self.max_num_reqs, width, dtype=torch.int32, device=self.device))

    # ---- one round

    def sample_draft(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Keeps what the host would sample its first draft from; nothing of what it does with the result is used."""
        num_reqs = hidden_states.shape[0]
        self.root_scores[:num_reqs].copy_(hidden_states)
        return torch.zeros(num_reqs, dtype=torch.int64, device=hidden_states.device)

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
        *args: Any,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        if not dummy_run:
            self.trees.linearise(input_batch)
            last_hidden_states = self.trees.in_path_order(last_hidden_states)
            if aux_hidden_states:
                aux_hidden_states = [self.trees.in_path_order(hidden) for hidden in aux_hidden_states]
        EagleSpeculator.propose(
            self,
            input_batch,
            attn_metadata,
            slot_mappings,
            last_hidden_states,
            aux_hidden_states,
            num_sampled,
            num_rejected,
            last_sampled,
            *args,
            **{**kwargs, "dummy_run": dummy_run, "num_speculative_tokens": 1},
        )
        num_reqs = input_batch.num_reqs
        if attn_metadata is None:  # a profiling run
            return self.draft_tokens[:num_reqs]
        block_table = attn_metadata[next(iter(self.draft_attn_layer_names))].block_table
        return self._draft(input_batch, dummy_run, last_sampled, block_table)

    def _draft_by_model(self, root_token_ids: torch.Tensor, *inputs: torch.Tensor) -> Draft:
        """The levels behind the first forward, from fixed places and the block table ``[num_reqs, max_blocks]``."""
        num_reqs = root_token_ids.shape[0]
        levels = _Levels(self, num_reqs, *inputs)
        return grow_tree(
            root_token_ids,
            DraftFeatures(self.root_scores[:num_reqs], self.hidden_states[:num_reqs]),
            self._score,
            levels.forward,
            num_nodes=self.options.num_speculative_tokens,
            draft_depth=self.options.draft_depth,
            draft_top_k=self.options.draft_top_k,
            static=True,
        )

    def _score(self, _level: int, hidden: torch.Tensor, top_k: int) -> Children:
        if self._draft_head is not None:
            logits = self._draft_head(hidden)
        elif self._draft_to_target is not None:
            logits = self.model.logits_processor(self.model.lm_head, hidden)
        else:
            logits = self.model.compute_logits(hidden)
        return likeliest(logits, top_k, self._draft_to_target)

    @property
    def scratch_capacity(self) -> int:
        """Nodes that one request feeds in a round."""
        return self.options.draft_top_k * max(self.options.draft_depth - 1, 1)

    def scratch(self, rows: torch.Tensor) -> dict[str, KvScratch]:
        """Scratch of every draft layer for the nodes that go to ``rows``; allocated once, for all requests."""
        if self._scratch is None:
            names = list(self.draft_attn_layer_names)
            layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase, names)
            shapes = {name: (layer.impl.num_kv_heads, layer.impl.head_size) for name, layer in layers.items()}
            self._scratch = DraftScratch(shapes, self.dtype, self.device)
        return self._scratch.at(rows, self.max_num_reqs * self.scratch_capacity)


class _Levels:
    """The drafter forwards of one round behind the first."""

    def __init__(self, speculator: TreeEagleSpeculator, num_reqs: int, block_table: torch.Tensor):
        self.speculator, self.num_reqs = speculator, num_reqs
        self.block_table = block_table[:num_reqs]
        #: Of each request's newest accepted row.
        self.positions = speculator.input_buffers.positions[:num_reqs].clone()
        self.context_lens = (self.positions + 1).to(torch.int32)
        requests = torch.arange(num_reqs, dtype=torch.int32, device=block_table.device)
        self.query_start = requests * speculator.options.draft_top_k
        self.tree_start = requests * speculator.scratch_capacity

    def forward(self, level: int, token_ids: torch.Tensor, features: torch.Tensor, mask: torch.Tensor) -> DraftFeatures:
        speculator = self.speculator
        num_reqs, width = token_ids.shape
        rows = torch.arange(level * width, (level + 1) * width, device=token_ids.device)
        metadata = level_metadata(
            self.block_table,
            self.context_lens,
            self.tree_start,
            mask,
            speculator.scratch((self.tree_start.long().unsqueeze(1) + rows).flatten()),
            query_start=self.query_start,
            max_context_len=speculator.draft_max_seq_len,
        )
        # All nodes of a level share a position; near max_model_len the last ones cannot be emitted anyway.
        positions = (self.positions + level + 1).clamp(max=speculator.max_model_len - 1).repeat_interleave(width)
        with set_forward_context(
            dict.fromkeys(speculator.draft_attn_layer_names, metadata),
            speculator.vllm_config,
            num_tokens=num_reqs * width,
            slot_mapping={},
        ):
            output = speculator.model(
                input_ids=token_ids.flatten().to(torch.int32),
                positions=positions,
                hidden_states=features.flatten(0, 1),
                inputs_embeds=None,
            )
        score, feed = output if isinstance(output, tuple) else (output, output)
        return DraftFeatures(score.unflatten(0, (num_reqs, width)), feed.unflatten(0, (num_reqs, width)))
