"""EAGLE and MTP on the V1 runner: vLLM's model loading, paged KV and first forward; our growth of trees."""

from __future__ import annotations

import functools
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.forward_context import set_forward_context
from vllm.v1.spec_decode.eagle import EagleProposer

from vllm_specplug.core.draft_sampling import Children, DraftSampling
from vllm_specplug.cpu.drafters.draft_operator import draft_layer_of
from vllm_specplug.cpu.drafters.eagle_version import NewEagleVersion
from vllm_specplug.cpu.drafters.levels import Growth, LevelDrafter, draft_metadata, plain_positions
from vllm_specplug.cpu.kernels.draft_layer import DraftLayer, DraftVocabulary
from vllm_specplug.cpu.kernels.likeliest import likeliest
from vllm_specplug.proposers.eagle2.context_vocabulary import ContextVocabulary
from vllm_specplug.proposers.eagle2.drafting import DraftFeatures
from vllm_specplug.proposers.eagle2.versions import VersionCheck
from vllm_specplug.types import Draft
from vllm_specplug.vllm.drafters.context_writer import ContextWriter
from vllm_specplug.vllm.drafters.eagle_levels import EagleScorer, pair_of
from vllm_specplug.vllm.drafters.setup import target_info
from vllm_specplug.vllm.drafters.target_parts import TargetHead, TargetParts

if TYPE_CHECKING:
    from vllm_specplug.cpu.draft import AcceptedRows

#: Context rows from which on the drafter's key/value is written without the rest of its forward.  With fewer rows the
#: extra calls take as long as they save (benchmarks/micro/test_draft_context.py).
WRITTEN_ROWS = 32


class TreeEagleProposer(LevelDrafter, EagleProposer):
    """EAGLE-2 (and EAGLE-3 heads and MTP layers in EAGLE-2 trees) on vLLM's paged draft KV.

    The first forward reads the target's hidden states beside the accepted tokens; if there are many rows, only the
    last row of each request takes it.
    """

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any):
        super().__init__(vllm_config, device, runner)
        self._vocabulary: ContextVocabulary | None = None
        #: None: every row takes the whole forward.
        self.context: ContextWriter | None = None

    def finish(self, request_ids: Collection[str]) -> None:
        super().finish(request_ids)
        if self._vocabulary is not None:
            self._vocabulary.finish(request_ids)

    # ---- loading

    def load_model(self, target_model: torch.nn.Module) -> None:
        self._target_model = target_model
        super().load_model(TargetParts(target_model, target_info(self.vllm_config.model_config)))
        simple = not (self.needs_extra_input_slots or self.use_heterogeneous_vocab or self.uses_mrope)
        if self.device.type == "cpu" and simple and ContextWriter.supports(self.model):
            self.context = ContextWriter(self.model)

    @functools.cached_property
    def operator(self) -> DraftLayer | None:
        """Runs the head; None: vLLM does, whose attention layer sends its keys and values to a KV connector.

        The weights are packed before first use.
        """
        if self.context is None or self.vllm_config.kv_transfer_config is not None:
            return None
        max_position = self.vllm_config.model_config.max_model_len - 1
        return draft_layer_of(self.model, self.dtype, self._scratch.capacity, max_position)

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

    # ---- one draft phase

    def _read(self, **kwargs: Any) -> None:
        super()._read(**self._last_rows_only(kwargs))

    def _read_missed(self, **kwargs: Any) -> None:
        if self.context is None:
            return super()._read_missed(**kwargs)
        metadata = kwargs["common_attn_metadata"]
        last = metadata.query_start_loc[1:] - 1
        shifted = rotated(kwargs["target_token_ids"], last, kwargs["next_token_ids"])
        positions = plain_positions(kwargs["target_positions"])
        self.context.write(shifted, positions, kwargs["target_hidden_states"], metadata.slot_mapping)

    def propose_by_operator(self, hidden_states: torch.Tensor, accepted: AcceptedRows) -> Draft:
        """Draft one tree per request with ``operator``; arguments as of ``skip_draft``."""
        begin = time.perf_counter()
        batch, num_reqs = self.runner.input_batch, len(accepted.counts)
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
            draft, growth.beams, growth.level_seconds = self.operator.grow(
                root_token_ids,
                root,
                vocabulary,
                num_nodes=self.options.num_speculative_tokens,
                draft_top_k=self.options.draft_top_k,
                level_floors=growth.floors,
                min_node_value=self.options.node_floor,
            )
        else:
            draft = self._grow(root_token_ids, DraftFeatures(root, root), self._run_level, growth)
        return self._end_growth(draft, growth, first_pass, len(rows))

    def _run_level(
        self, number: int, token_ids: torch.Tensor, features: torch.Tensor, mask: torch.Tensor
    ) -> DraftFeatures:
        """Run a level with ``operator``, see ``proposers.eagle2.drafting.grow_tree``."""
        outputs = self.operator.forward(number, token_ids, features, mask)
        return DraftFeatures(outputs, outputs)

    def _begin_growth(self, num_reqs: int) -> Growth:
        """Begin to grow trees, and bring the rows of the requests' own tokens up to date."""
        batch = self.runner.input_batch
        if self._vocabulary is not None:
            self._vocabulary.update(batch.req_ids, batch.token_ids_cpu, batch.num_tokens_no_spec[: batch.num_reqs])
        return super()._begin_growth(num_reqs)

    def _vocabulary_at_once(self) -> DraftVocabulary | None:
        """Return the arguments with which ``operator`` drafts all levels in one call.

        None: a draft is sampled, or the operator cannot compute the LM head.
        """
        scorer, texts = self._scorer, self._vocabulary
        head = None if scorer.head is None else scorer.head.linear
        if head is None or self.runner.samples_drafts:
            return None
        if texts is None:
            return DraftVocabulary(head, scorer.draft_ids)
        return DraftVocabulary(head, texts.ids, texts.extra_rows, texts.other_requests)

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
        self.context.write(shifted, plain_positions(positions), hidden_states, slots)
        query_start = torch.arange(metadata.num_reqs + 1, dtype=torch.int32)
        one_row_each = draft_metadata(
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
                super()._score(hidden, self.options.draft_top_k)
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
            super()._score(hidden[:num_rows], self.options.draft_top_k)

    def _logits(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._scorer.logits(hidden), self._scorer.draft_ids

    def _score(
        self, hidden: torch.Tensor, top_k: int, level: int = 0, sampling: DraftSampling | None = None
    ) -> Children:
        if self._vocabulary is None:
            return super()._score(hidden, top_k, level, sampling)
        logits, extra = self._scorer.logits(hidden), self._vocabulary.extra_logits(hidden)
        draft_ids = self._vocabulary.ids
        if sampling is None:
            return likeliest(logits, top_k, draft_ids, extra)
        return sampling.children(torch.cat((logits, extra), dim=1), level, top_k, draft_ids)


def rotated(token_ids: torch.Tensor, last: torch.Tensor, next_token_ids: torch.Tensor) -> torch.Tensor:
    """Return the tokens after the rows: ``token_ids`` moved by one, ``next_token_ids`` at the ``last`` rows."""
    shifted = token_ids.roll(-1)
    shifted[last.long()] = next_token_ids.to(shifted.dtype)
    return shifted
