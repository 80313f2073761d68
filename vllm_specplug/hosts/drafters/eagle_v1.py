"""The host's EAGLE proposer, drafting trees: its model loading, paged KV and first forward; our growth."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.eagle import EagleProposer

from vllm_specplug.config import Eagle2Options
from vllm_specplug.core.draft_sampling import Children, DraftSampling, likeliest
from vllm_specplug.core.kv import DraftScratch, KvScratch
from vllm_specplug.core.tree import prune
from vllm_specplug.hosts.drafters.base import RoundHooks
from vllm_specplug.hosts.drafters.catch_up import MissedRows
from vllm_specplug.hosts.drafters.context_writer import ContextWriter
from vllm_specplug.hosts.drafters.draft_head import DraftHead
from vllm_specplug.proposers.eagle2.checkpoint import target_ids
from vllm_specplug.proposers.eagle2.context_vocabulary import ContextVocabulary
from vllm_specplug.proposers.eagle2.drafting import DraftFeatures, grow_tree
from vllm_specplug.types import Draft

if TYPE_CHECKING:
    from vllm_specplug.hosts.v1.budgeting import ServingBudget


#: From so many rows on, besides those from which drafts grow, the drafter's context is written without the rest of its
#: forward: with less to save, the calls for that may take as long (benchmarks/micro/test_draft_context.py).
WRITTEN_ROWS = 32


class TreeEagleProposer(RoundHooks, EagleProposer):
    """EAGLE-2 (and EAGLE-3 heads in EAGLE-2 trees) on the host's paged draft KV.

    The first forward of a round is the host's own: it re-runs the drafter over the accepted
    tokens with the target's hidden states (stable KV); of many rows only over the last of each request.  The levels
    behind it keep their key/value in a scratch that is thrown away, so that drafting never touches committed pages.
    """

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any, options: Eagle2Options):
        super().__init__(vllm_config, device, runner)
        self.options, self.runner = options, runner
        #: int64 ``[num_flat_rows]``: which row of the last forward holds each flat row's accepted token.
        self.path_rows: torch.Tensor | None = None
        self._head: DraftHead | None = None
        self._has_own_head = False
        self._draft_to_target: torch.Tensor | None = None
        self._vocabulary: ContextVocabulary | None = None
        self._first_pass: tuple[Any, ...] | None = None
        #: What the drafter has not seen of the requests, see ``catch_up``.
        self.missed = MissedRows(self.max_num_tokens)
        #: The measured budget; None with a fixed one.
        self.budget: ServingBudget | None = None
        #: None where every row takes the whole forward.
        self.context: ContextWriter | None = None

    def finish(self, request_ids: Collection[str]) -> None:
        self.missed.finish(request_ids)
        if self._vocabulary is not None:
            self._vocabulary.finish(request_ids)

    # ---- loading

    def load_model(self, target_model: torch.nn.Module) -> None:
        super().load_model(target_model)
        self.model.register_forward_hook(self._keep_output)
        layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase, list(self._draft_attn_layer_names))
        self.draft_layers = {name: layer.impl for name, layer in layers.items()}
        shapes = {name: (impl.num_kv_heads, impl.head_size) for name, impl in self.draft_layers.items()}
        self._scratch = DraftScratch(shapes, self.dtype, self.device)
        simple = not (self.needs_extra_input_slots or self.use_heterogeneous_vocab or self.uses_mrope)
        if self.device.type == "cpu" and simple and ContextWriter.knows(self.model):
            self.context = ContextWriter(self.model)

    def _keep_output(self, _module: Any, _args: Any, output: Any) -> None:
        self._last_output = output

    def _maybe_share_lm_head(self, target_language_model: torch.nn.Module) -> None:
        super()._maybe_share_lm_head(target_language_model)
        d2t = getattr(self.model, "d2t", None)
        if d2t is None:
            d2t = getattr(self.model, "draft_id_to_target_id", None)
            if d2t is not None:  # EAGLE-3: a head of its own in the draft vocabulary
                self._has_own_head = True
                self._draft_to_target = target_ids(d2t.data)
            return
        self._draft_to_target = target_ids(d2t).to(self.device)
        if get_tensor_model_parallel_world_size() > 1:
            return  # no rank has all rows of the head
        lm_head = target_language_model.lm_head.weight.data
        self._head = DraftHead(lm_head[self._draft_to_target].contiguous(), bool(self.options.draft_int8))
        if self.device.type == "cpu":
            self._vocabulary = ContextVocabulary(lm_head, self._draft_to_target)

    # ---- drafting paused

    def skip_round(self, hidden_states: torch.Tensor, sampled_token_ids: list[list[int]], num_drafts: Any) -> None:
        """Keep the step's accepted rows for later, in place of a round.

        Args:
            hidden_states: ``[num_flat_rows, hidden_size]`` of the step (EAGLE-3: of all its layers, side by side).
            sampled_token_ids: what each request emitted.
            num_drafts: int ``[num_reqs]``; its drafted nodes.
        """
        batch, num_reqs = self.runner.input_batch, self.runner.input_batch.num_reqs
        first = self.runner.query_start_loc.np[: num_reqs + 1]
        emitted = np.array([len(token_ids) for token_ids in sampled_token_ids])
        counts = np.diff(first) - np.where(num_drafts > 0, num_drafts + 1 - emitted, 0)
        kept = self.missed.admit(batch.req_ids, counts)
        if not kept.any():
            return
        flat = np.arange(counts.sum()) + np.repeat(first[:-1] - np.cumsum(counts) + counts, counts)
        flat_rows = torch.from_numpy(flat[np.repeat(kept, counts)])
        rows = hidden_states[self.path_rows[flat_rows] if num_drafts.any() else flat_rows]
        starts = batch.num_computed_tokens_cpu[:num_reqs][kept].tolist()
        request_ids = [batch.req_ids[place] for place in np.flatnonzero(kept)]
        self.missed.add(request_ids, rows, starts, counts[kept].tolist())

    def catch_up(self) -> None:
        """Run the drafter over what it has missed of the scheduled requests: their key/value is then complete."""
        batch = self.runner.input_batch
        taken = self.missed.take(batch.req_ids)
        if not taken:
            return
        places, starts, hidden = zip(*taken, strict=True)
        counts = np.array([len(rows) for rows in hidden])
        ends = np.array(starts) + counts
        ranges = list(zip(places, starts, ends.tolist(), strict=True))
        token_ids = np.concatenate([batch.token_ids_cpu[place, start:end] for place, start, end in ranges])
        positions = torch.from_numpy(np.concatenate([np.arange(start, end) for _, start, end in ranges]))
        table = batch.block_table[0]
        block_table = table.get_device_tensor(batch.num_reqs)[list(places)]
        requests = torch.from_numpy(np.repeat(np.arange(len(taken)), counts))
        blocks = block_table[requests, positions // table.block_size].long()
        slot_mapping = blocks * table.block_size + positions % table.block_size
        next_token_ids = torch.from_numpy(batch.token_ids_cpu[list(places), ends])
        query_start = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
        if self.context is not None:
            shifted = rotated(torch.from_numpy(token_ids), query_start[1:] - 1, next_token_ids)
            self.context.write(shifted, positions, torch.cat(hidden), slot_mapping)
            return
        seq_lens = torch.from_numpy(ends.astype(np.int32))
        metadata = _metadata(query_start, seq_lens, int(counts.max()), int(ends.max()), block_table, slot_mapping)
        super().propose(
            num_speculative_tokens=0,
            target_token_ids=torch.from_numpy(token_ids),
            target_positions=positions,
            target_hidden_states=torch.cat(hidden),
            next_token_ids=next_token_ids,
            token_indices_to_sample=None,
            common_attn_metadata=metadata,
            sampling_metadata=batch.sampling_metadata,
        )
        self.num_speculative_tokens = self.speculative_config.num_speculative_tokens

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
        begin = time.perf_counter()
        # With no tokens to draft, the host's propose is just the re-seeding forward.
        super().propose(**{**self._last_rows_only(kwargs), "num_speculative_tokens": 0})
        first_pass = time.perf_counter() - begin
        self.num_speculative_tokens = self.speculative_config.num_speculative_tokens
        assert self._first_pass is not None
        num_rows = len(kwargs["target_token_ids"])
        _, rows, metadata = self._first_pass
        score, feed = self._last_output
        positions = self.positions[rows]
        level = _Levels(self, positions, metadata.block_table_tensor)
        if self._vocabulary is not None:
            batch = self.runner.input_batch
            self._vocabulary.look(batch.req_ids, batch.token_ids_cpu, batch.num_tokens_no_spec[: batch.num_reqs])
        growth = _Growth(self.options.level_floor, self.budget)
        sampling = self.runner.draft_noise.sampling(self.options.draft_depth, self.options.draft_top_k)

        def score_level(number: int, hidden: torch.Tensor, top_k: int) -> Children:
            children = self._score(hidden, top_k, number, sampling, self._vocabulary)
            growth.scored(number)
            return children

        draft = grow_tree(
            kwargs["next_token_ids"].long(),
            DraftFeatures(score[rows], feed[rows]),
            score_level,
            level.forward,
            num_nodes=self.options.num_speculative_tokens,
            draft_depth=self.options.draft_depth,
            draft_top_k=self.options.draft_top_k,
            min_node_value=self.options.node_floor,
            may_grow=growth.may_grow,
        )
        if self.budget is not None:
            growth.report(first_pass, num_rows, len(rows) * self.options.draft_top_k)
        if unread := self.missed.unread:
            read = torch.tensor([request_id not in unread for request_id in self.runner.input_batch.req_ids])
            draft = prune(draft, read[:, None].expand_as(draft.log_values))
        return draft

    def writes(self, num_rows: int, num_reqs: int) -> bool:
        """Whether so many rows of so many requests are written, and only the last of each runs."""
        return self.context is not None and num_rows - num_reqs >= WRITTEN_ROWS

    def _last_rows_only(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the host's first forward, of the last row of each request where all are written first."""
        metadata, token_ids = kwargs["common_attn_metadata"], kwargs["target_token_ids"]
        if kwargs.get("token_indices_to_sample") is not None or not self.writes(len(token_ids), metadata.num_reqs):
            return kwargs
        positions, hidden_states = kwargs["target_positions"], kwargs["target_hidden_states"]
        last = metadata.query_start_loc[1:].long() - 1
        slots = metadata.slot_mapping[: len(token_ids)]
        shifted = rotated(token_ids, last, kwargs["next_token_ids"])
        self.context.write(shifted, positions, hidden_states, slots)
        query_start = torch.arange(metadata.num_reqs + 1, dtype=torch.int32)
        one_row_each = _metadata(
            query_start, metadata.seq_lens, 1, metadata.max_seq_len, metadata.block_table_tensor, slots[last]
        )
        return {
            **kwargs,
            "target_token_ids": token_ids[last],
            "target_positions": positions[last],
            "target_hidden_states": hidden_states[last],
            "common_attn_metadata": one_row_each,
        }

    def _score(
        self,
        hidden: torch.Tensor,
        top_k: int,
        level: int = 0,
        sampling: DraftSampling | None = None,
        vocabulary: ContextVocabulary | None = None,
    ) -> Children:
        draft_ids = self._draft_to_target
        if self._head is not None:
            logits = self._head(hidden)
            if vocabulary is not None:
                logits, draft_ids = vocabulary.extend(logits, hidden), vocabulary.ids
        elif self._has_own_head:
            logits = self.model.logits_processor(self.model.lm_head, hidden)
        else:
            logits = self.model.compute_logits(hidden)
            if self._draft_to_target is not None:
                logits = logits[:, self._draft_to_target]
        if sampling is None:
            return likeliest(logits, top_k, draft_ids)
        return sampling.children(logits, level, top_k, draft_ids)

    def scratch(self, num_reqs: int, level: int) -> dict[str, KvScratch]:
        """Scratch of every draft layer for the nodes fed at ``level``, allocated on first use."""
        top_k, capacity = self.options.draft_top_k, self.scratch_capacity
        requests = torch.arange(num_reqs, device=self.device).unsqueeze(1) * capacity
        rows = (requests + torch.arange(level * top_k, (level + 1) * top_k, device=self.device)).flatten()
        return self._scratch.at(rows, num_reqs * capacity)

    @property
    def scratch_capacity(self) -> int:
        """Nodes that one request feeds in a round."""
        return self.options.draft_top_k * max(self.options.draft_depth - 1, 1)


def rotated(token_ids: torch.Tensor, last: torch.Tensor, next_token_ids: torch.Tensor) -> torch.Tensor:
    """The tokens behind the rows: ``token_ids`` moved by one, ``next_token_ids`` at the ``last`` rows."""
    shifted = token_ids.roll(-1)
    shifted[last.long()] = next_token_ids.to(shifted.dtype)
    return shifted


def _metadata(
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> CommonAttentionMetadata:
    return CommonAttentionMetadata(
        query_start_loc=query_start,
        query_start_loc_cpu=query_start,
        seq_lens=seq_lens,
        seq_lens_cpu_upper_bound=seq_lens,
        num_reqs=len(seq_lens),
        num_actual_tokens=len(slot_mapping),
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        block_table_tensor=block_table,
        slot_mapping=slot_mapping,
    )


class _Growth:
    """Whether a round's next level is drafted, and what each took."""

    def __init__(self, floor: float, budget: ServingBudget | None):
        self.floor, self.budget = floor, budget
        self._asked = 0.0
        self._level_seconds: list[float] = []

    def may_grow(self, beam_values: torch.Tensor) -> bool:
        self._asked = time.perf_counter()
        grows = not self.floor or bool(beam_values.sum(dim=1).mean() >= self.floor)
        return grows and (self.budget is None or self.budget.budget.may_grow(beam_values))

    def scored(self, level: int) -> None:
        """The nodes of a level are known; those of the first come with the first pass."""
        if level:
            self._level_seconds.append(time.perf_counter() - self._asked)

    def report(self, first_pass: float, num_rows: int, level_rows: int) -> None:
        """Tell the budget what the round took: its first pass over ``num_rows`` in seconds, and the levels."""
        assert self.budget is not None
        self.budget.drafted(first_pass, num_rows, self._level_seconds, level_rows)


class _Levels:
    """The drafter forwards of one round behind the first."""

    def __init__(self, proposer: TreeEagleProposer, positions: torch.Tensor, block_table: torch.Tensor):
        self.proposer = proposer
        self.positions = positions
        num_reqs = positions.shape[0]
        self.block_table = block_table[:num_reqs]
        self.context_lens = (positions + 1).to(torch.int32)
        self.requests = torch.arange(num_reqs, dtype=torch.int32, device=positions.device)

    def forward(self, level: int, token_ids: torch.Tensor, features: torch.Tensor, mask: torch.Tensor) -> DraftFeatures:
        proposer = self.proposer
        num_reqs, width = token_ids.shape
        num_tokens = num_reqs * width
        tree_start = self.requests * proposer.scratch_capacity
        scratch = proposer.scratch(num_reqs, level)
        metadata = proposer.runner.scratch_metadata(
            self.block_table, self.context_lens, width, tree_start, mask, scratch
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
