"""EAGLE and MTP on the V1 runner: vLLM's model loading, paged KV and first forward; our growth of trees."""

from __future__ import annotations

import functools
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.eagle import EagleProposer

from vllm_specplug.config import GrownOptions, model_drafter
from vllm_specplug.core.draft_sampling import Children, DraftSampling
from vllm_specplug.core.step import StepPlan
from vllm_specplug.cpu.attention import level_metadata
from vllm_specplug.cpu.drafters.accepted_rows import AcceptedRows
from vllm_specplug.cpu.drafters.base import DraftHooks
from vllm_specplug.cpu.drafters.catch_up import MissedRows
from vllm_specplug.cpu.drafters.draft_operator import DraftOperator
from vllm_specplug.cpu.drafters.eagle_version import NewEagleVersion
from vllm_specplug.cpu.drafters.growth import Growth
from vllm_specplug.cpu.kernels.draft_layer import DraftVocabulary
from vllm_specplug.cpu.kernels.likeliest import likeliest
from vllm_specplug.cpu.kernels.tree_ops import OPERATORS, prune
from vllm_specplug.proposers.eagle2.context_vocabulary import ContextVocabulary
from vllm_specplug.proposers.eagle2.drafting import DraftFeatures, Forward, grow_tree
from vllm_specplug.proposers.eagle2.versions import VersionCheck
from vllm_specplug.types import Draft
from vllm_specplug.vllm.drafters.context_writer import ContextWriter
from vllm_specplug.vllm.drafters.eagle_levels import EagleLevels, EagleScorer, LevelScratch, keep_output, pair_of
from vllm_specplug.vllm.drafters.setup import target_info
from vllm_specplug.vllm.drafters.target_parts import TargetHead, TargetParts

#: Context rows from which on the drafter's key/value is written without the rest of its forward.  With fewer rows the
#: extra calls take as long as they save (benchmarks/micro/test_draft_context.py).
WRITTEN_ROWS = 32


class TreeEagleProposer(DraftHooks, EagleProposer):
    """EAGLE-2 (and EAGLE-3 heads and MTP layers in EAGLE-2 trees) on vLLM's paged draft KV.

    The first forward of a draft phase is vLLM's own.  It runs the drafter over the accepted tokens with the target's
    hidden states (stable KV); if there are many rows, only over the last row of each request.  The levels after it
    keep their key/value in a scratch, so that drafting never touches committed pages.
    """

    grows_by_level = True

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any):
        super().__init__(vllm_config, device, runner)
        self.options: GrownOptions = model_drafter(vllm_config.speculative_config.specplug)
        self.runner = runner
        #: ``StepPlan.path_index`` on the drafter's device.
        self.path_index: torch.Tensor | None = None
        self._vocabulary: ContextVocabulary | None = None
        self._first_pass: tuple[Any, ...] | None = None
        #: Rows that the drafter has not read, see ``catch_up``.
        self.missed = MissedRows(self.max_num_tokens)
        #: None: every row takes the whole forward.
        self.context: ContextWriter | None = None

    def follow(self, plan: StepPlan) -> None:
        self.path_index = plan.path_index.to(self.device)

    def finish(self, request_ids: Collection[str]) -> None:
        self.missed.finish(request_ids)
        if self._vocabulary is not None:
            self._vocabulary.finish(request_ids)

    # ---- loading

    def load_model(self, target_model: torch.nn.Module) -> None:
        self._target_model = target_model
        super().load_model(TargetParts(target_model, target_info(self.vllm_config.model_config)))
        layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase, list(self._draft_attn_layer_names))
        self.draft_layers = {name: layer.impl for name, layer in layers.items()}
        self._scratch = LevelScratch(self.vllm_config, self.draft_layers, self.options, self.device)
        simple = not (self.needs_extra_input_slots or self.use_heterogeneous_vocab or self.uses_mrope)
        if self.device.type == "cpu" and simple and ContextWriter.supports(self.model):
            self.context = ContextWriter(self.model)
        keep_output(self.model, self._keep_output)

    @functools.cached_property
    def operator(self) -> DraftOperator | None:
        """Runs the head; None: vLLM does, whose attention layer sends its keys and values to a KV connector.

        The weights are packed before first use.
        """
        if self.context is None or self.vllm_config.kv_transfer_config is not None:
            return None
        max_position = self.vllm_config.model_config.max_model_len - 1
        return DraftOperator.make(self.model, self.dtype, self._scratch.capacity, max_position)

    def _keep_output(self, output: Any) -> None:
        self._last_output = output

    def _maybe_share_lm_head(self, target_language_model: torch.nn.Module) -> None:
        super()._maybe_share_lm_head(target_language_model)
        self._head = TargetHead(self._target_model, self.vllm_config.model_config.get_hidden_size(), self.dtype)
        self._scorer = EagleScorer(self.model, self._head, bool(getattr(self.options, "draft_int8", False)))
        self._vocabulary = self.vocabulary_beside(self._scorer)

    def vocabulary_beside(self, scorer: EagleScorer) -> ContextVocabulary | None:
        """Make the rows of the requests' own tokens beside a draft vocabulary; None if there are none."""
        size = getattr(self.options, "context_vocabulary", 0)
        if scorer.head is None or self.device.type != "cpu" or not self._head.gathers or not size:
            return None
        return ContextVocabulary(
            self._head.rows, self.vllm_config.model_config.get_vocab_size(), scorer.draft_ids, size
        )

    # ---- other weights

    def version_check(self, folder: str) -> VersionCheck:
        return VersionCheck(folder, self.vllm_config.model_config.model)

    def new_version(self, folder: Path, check: VersionCheck) -> NewEagleVersion:
        return NewEagleVersion(self, check.read(folder), {id(one) for one in self._target_model.parameters()})

    # ---- drafting paused

    def skip_draft(
        self,
        hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        sampled_token_ids: list[list[int]],
        num_drafts: np.ndarray,
    ) -> None:
        """Keep the step's accepted rows for later."""
        if self.runner.use_aux_hidden_state_outputs:
            hidden_states = torch.cat(aux_hidden_states, dim=-1)
        batch, num_reqs = self.runner.input_batch, self.runner.input_batch.num_reqs
        accepted = self._accepted_rows(sampled_token_ids, num_drafts)
        kept = self.missed.admit(batch.req_ids, accepted.counts)
        if not kept.any():
            return
        starts = batch.num_computed_tokens_cpu[:num_reqs][kept].tolist()
        request_ids = [batch.req_ids[place] for place in np.flatnonzero(kept)]
        self.missed.add(request_ids, hidden_states[accepted.of(kept)], starts, accepted.counts[kept].tolist())

    def catch_up(self) -> None:
        """Run the drafter over the missed rows of the scheduled requests; their key/value is then complete."""
        batch = self.runner.input_batch
        taken = self.missed.take(batch.req_ids)
        if not taken:
            return
        places, starts, hidden = zip(*taken, strict=True)
        counts = np.array([len(rows) for rows in hidden])
        ends = np.array(starts) + counts
        ranges = list(zip(places, starts, ends.tolist(), strict=True))
        token_ids = np.concatenate([batch.token_ids_cpu[place, start:end] for place, start, end in ranges])
        places_of_rows = torch.from_numpy(np.concatenate([np.arange(start, end) for _, start, end in ranges]))
        positions = torch.cat([self._target_positions(*one) for one in ranges], dim=-1)
        table = batch.block_table[self.kv_cache_gid]
        block_table = table.get_device_tensor(batch.num_reqs)[list(places)]
        requests = torch.from_numpy(np.repeat(np.arange(len(taken)), counts))
        blocks = block_table[requests, places_of_rows // table.block_size].long()
        slot_mapping = blocks * table.block_size + places_of_rows % table.block_size
        next_token_ids = torch.from_numpy(batch.token_ids_cpu[list(places), ends])
        query_start = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
        if self.context is not None:
            shifted = rotated(torch.from_numpy(token_ids), query_start[1:] - 1, next_token_ids)
            self.context.write(shifted, _plain(positions), torch.cat(hidden), slot_mapping)
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

    def _target_positions(self, place: int, start: int, end: int) -> torch.Tensor:
        """Return the target's positions of a request's tokens ``[start, end)``: ``[..., end - start]``."""
        if not self.runner.uses_mrope:
            return torch.arange(start, end)
        request = self.runner.requests[self.runner.input_batch.req_ids[place]]
        prompt = request.mrope_positions[:, start:end]
        rest = torch.arange(start + prompt.shape[1], end) + request.mrope_position_delta
        return torch.cat([prompt, rest.expand(len(prompt), -1)], dim=1)

    # ---- one draft phase

    def prepare_inputs(self, common_attn_metadata, sampled_token_ids, num_draft_tokens):
        """Turn vLLM's selection of accepted rows, a flat prefix, into path rows.

        Slots stay those of the flat prefix, to which the accepted key/value was moved.
        """
        metadata, token_indices = super().prepare_inputs(common_attn_metadata, sampled_token_ids, num_draft_tokens)
        return metadata, self.path_index[token_indices]

    def set_inputs_first_pass(self, *args: Any, **kwargs: Any):
        self._first_pass = super().set_inputs_first_pass(*args, **kwargs)
        return self._first_pass

    def propose(self, **kwargs: Any) -> Draft:  # type: ignore[override]
        """Draft one tree per request; vLLM would draft a chain."""
        begin = time.perf_counter()
        # With no tokens to draft, vLLM's propose is only the re-seeding forward.
        super().propose(**{**self._last_rows_only(kwargs), "num_speculative_tokens": 0})
        first_pass = time.perf_counter() - begin
        self.num_speculative_tokens = self.speculative_config.num_speculative_tokens
        assert self._first_pass is not None
        num_rows, rows, metadata = self._first_pass
        score, feed = pair_of(self._last_output)
        levels = EagleLevels(
            self.model,
            self._scratch,
            self._get_positions(num_rows)[..., rows],
            metadata.seq_lens[: len(rows)],
            metadata.block_table_tensor,
            len(rows),
            level_metadata,
            self._level_positions if self.uses_mrope else None,
        )
        root, growth = DraftFeatures(score[rows], feed[rows]), self._begin_growth(len(rows))
        draft = self._grow(kwargs["next_token_ids"].long(), root, levels.forward, growth)
        return self._end_growth(draft, growth, first_pass, len(kwargs["target_token_ids"]))

    def propose_by_operator(
        self, hidden_states: torch.Tensor, sampled_token_ids: list[list[int]], num_drafts: np.ndarray
    ) -> Draft:
        """Draft one tree per request with ``operator``; arguments as of ``skip_draft``."""
        begin = time.perf_counter()
        batch, accepted = self.runner.input_batch, self._accepted_rows(sampled_token_ids, num_drafts)
        num_reqs = len(accepted.counts)
        starts = batch.num_computed_tokens_cpu[:num_reqs].astype(np.int64)
        token_ids = batch.token_ids_cpu_tensor[:num_reqs]
        rows = accepted.of(np.ones(num_reqs, dtype=bool))
        counts = torch.from_numpy(accepted.counts.astype(np.int64))
        block_table = batch.block_table[self.kv_cache_gid].get_device_tensor(num_reqs)
        root = self.operator.first(token_ids, torch.from_numpy(starts), counts, hidden_states, rows, block_table)
        first_pass = time.perf_counter() - begin
        root_token_ids = torch.from_numpy(batch.token_ids_cpu[np.arange(num_reqs), starts + accepted.counts]).long()
        growth = self._begin_growth(num_reqs)
        if (vocabulary := self._vocabulary_at_once()) is not None:
            draft = self.operator.grow(root_token_ids, root.score, vocabulary, growth, self.options)
        else:
            draft = self._grow(root_token_ids, root, self.operator.forward, growth)
        return self._end_growth(draft, growth, first_pass, len(rows))

    def _accepted_rows(self, sampled_token_ids: list[list[int]], num_drafts: np.ndarray) -> AcceptedRows:
        query_start = self.runner.query_start_loc.np[: self.runner.input_batch.num_reqs + 1]
        emitted = np.array([len(token_ids) for token_ids in sampled_token_ids])
        return AcceptedRows.make(query_start, emitted, num_drafts, self.path_index)

    def _begin_growth(self, num_reqs: int) -> Growth:
        """Begin to grow trees: bring the rows of the requests' own tokens up to date, and ask how deep trees may be."""
        batch, options = self.runner.input_batch, self.options
        if self._vocabulary is not None:
            self._vocabulary.update(batch.req_ids, batch.token_ids_cpu, batch.num_tokens_no_spec[: batch.num_reqs])
        floors = self.limits.floors or [0.0] * (options.draft_depth - 1)
        return Growth([max(floor, options.level_floor * num_reqs) for floor in floors])

    def _grow(self, root_token_ids: torch.Tensor, root: DraftFeatures, forward: Forward, growth: Growth) -> Draft:
        """Grow the trees level by level."""
        sampling = self.runner.draft_noise.sampling(self.options.draft_depth, self.options.draft_top_k)

        def score_level(number: int, hidden: torch.Tensor, top_k: int) -> Children:
            children = self._score(hidden, top_k, number, sampling, self._vocabulary)
            growth.scored(number)
            return children

        return grow_tree(
            root_token_ids,
            root,
            score_level,
            forward,
            num_nodes=self.options.num_speculative_tokens,
            draft_depth=self.options.draft_depth,
            draft_top_k=self.options.draft_top_k,
            min_node_value=self.options.node_floor,
            may_grow=growth.may_grow,
            ops=OPERATORS,
        )

    def _vocabulary_at_once(self) -> DraftVocabulary | None:
        """Return the arguments with which ``operator`` drafts all levels in one call.

        None: a draft is sampled, or the operator cannot compute the LM head.
        """
        scorer, texts = self._scorer, self._vocabulary
        head = None if scorer.head is None else scorer.head.linear
        if head is None or self.runner.draft_noise.samples:
            return None
        if texts is None:
            return DraftVocabulary(head, scorer.draft_ids)
        return DraftVocabulary(head, texts.ids, texts.extra_rows, texts.other_requests)

    def _end_growth(self, draft: Draft, growth: Growth, first_pass: float, num_read: int) -> Draft:
        """Report the growth, and remove the drafts of requests with rows that the drafter has not read.

        Args:
            draft: the trees.
            growth: of these.
            first_pass: seconds of the first forward.
            num_read: rows that it read.
        """
        record = self.record
        record.read_seconds, record.num_read, record.beams = first_pass, num_read, growth.beams
        record.level_seconds, record.level_rows = growth.level_seconds, len(draft.log_values) * self.options.draft_top_k
        if not (unread := self.missed.unread):
            return draft
        read = torch.tensor([request_id not in unread for request_id in self.runner.input_batch.req_ids])
        return prune(draft, read[:, None].expand_as(draft.log_values))

    def _level_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Put M-RoPE positions of a level where the compiled drafter reads them, see ``EagleLevels``."""
        self._set_positions(positions.shape[1], positions)
        return self._get_positions(positions.shape[1])

    def writes(self, num_rows: int, num_reqs: int) -> bool:
        """Return whether only the last row of each request runs, and the others are written as key/value."""
        return self.context is not None and num_rows - num_reqs >= WRITTEN_ROWS

    def _last_rows_only(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Reduce vLLM's first forward to the last row of each request, if all rows are written first."""
        metadata, token_ids = kwargs["common_attn_metadata"], kwargs["target_token_ids"]
        if kwargs.get("token_indices_to_sample") is not None or not self.writes(len(token_ids), metadata.num_reqs):
            return kwargs
        positions, hidden_states = kwargs["target_positions"], kwargs["target_hidden_states"]
        last = metadata.query_start_loc[1:].long() - 1
        slots = metadata.slot_mapping[: len(token_ids)]
        shifted = rotated(token_ids, last, kwargs["next_token_ids"])
        self.context.write(shifted, _plain(positions), hidden_states, slots)
        query_start = torch.arange(metadata.num_reqs + 1, dtype=torch.int32)
        one_row_each = _metadata(
            query_start, metadata.seq_lens, 1, metadata.max_seq_len, metadata.block_table_tensor, slots[last]
        )
        return {
            **kwargs,
            "target_token_ids": token_ids[last],
            "target_positions": positions[..., last],
            "target_hidden_states": hidden_states[last],
            "common_attn_metadata": one_row_each,
        }

    def run_forward(self, num_rows: int, is_first: bool) -> None:
        if self.operator is not None:
            block_table = torch.zeros(1, num_rows + 1, dtype=torch.int32)  # vLLM's null block
            hidden = self.operator.run(num_rows, self.hidden_states, is_first, block_table)
            if not is_first:
                self._score(hidden, self.options.draft_top_k)
            return
        if is_first and self.writes(num_rows, 1):
            rows = slice(num_rows)
            self.context.key_value(self.input_ids[rows], self.positions[rows], self.hidden_states[rows])
            num_rows = 1
        with set_forward_context(None, self.vllm_config, num_tokens=num_rows):
            output = self.model(
                input_ids=self.input_ids[:num_rows],
                positions=self._get_positions(num_rows),
                hidden_states=self.hidden_states[:num_rows],
                inputs_embeds=None,
            )
            hidden, _ = pair_of(output)
        if not is_first:
            self._score(hidden[:num_rows], self.options.draft_top_k)

    def _score(
        self,
        hidden: torch.Tensor,
        top_k: int,
        level: int = 0,
        sampling: DraftSampling | None = None,
        vocabulary: ContextVocabulary | None = None,
    ) -> Children:
        logits, draft_ids, extra = self._scorer.logits(hidden), self._scorer.draft_ids, None
        if vocabulary is not None:
            extra, draft_ids = vocabulary.extra_logits(hidden), vocabulary.ids
        if sampling is None:
            return likeliest(logits, top_k, draft_ids, extra)
        if extra is not None:
            logits = torch.cat((logits, extra), dim=1)
        return sampling.children(logits, level, top_k, draft_ids)


def rotated(token_ids: torch.Tensor, last: torch.Tensor, next_token_ids: torch.Tensor) -> torch.Tensor:
    """Return the tokens after the rows: ``token_ids`` moved by one, ``next_token_ids`` at the ``last`` rows."""
    shifted = token_ids.roll(-1)
    shifted[last.long()] = next_token_ids.to(shifted.dtype)
    return shifted


def _plain(positions: torch.Tensor) -> torch.Tensor:
    """Return the positions that vLLM gives a drafter without M-RoPE: ``[num_rows]``, M-RoPE's first component."""
    return positions if positions.dim() == 1 else positions[0]


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
