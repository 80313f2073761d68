"""Drafters that vLLM loads as models, on the V1 runner: vLLM's paged KV and first forward; our growth of trees."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_specplug.config import ConfigError, GrownOptions, model_drafter
from vllm_specplug.core.draft_sampling import Children, DraftSampling
from vllm_specplug.core.step import StepPlan
from vllm_specplug.cpu.attention import level_metadata
from vllm_specplug.cpu.drafters.base import DraftHooks
from vllm_specplug.cpu.drafters.catch_up import MissedRows
from vllm_specplug.cpu.kernels.likeliest import likeliest
from vllm_specplug.cpu.kernels.tree_ops import OPERATORS, prune
from vllm_specplug.proposers.eagle2.drafting import DraftFeatures, Forward, grow_tree
from vllm_specplug.types import Draft
from vllm_specplug.vllm.drafters.eagle_levels import EagleLevels, LevelScratch, keep_output, pair_of

if TYPE_CHECKING:
    from vllm_specplug.cpu.draft import AcceptedRows


class Growth:
    """Decides which levels after the first one are drafted, and times them.

    Args:
        floors: of each level, see ``budget.choose.Plan``.

    Attributes:
        beams: of each level that was drafted, the sum that its floor is compared with.
        level_seconds: time of each of these.
    """

    def __init__(self, floors: list[float]):
        self.floors = floors
        self.beams: list[float] = []
        self.level_seconds: list[float] = []
        self._asked = 0.0

    def may_grow(self, beam_values: torch.Tensor) -> bool:
        """Decide whether the next level is drafted; it runs over nodes of these values, float ``[num_reqs, width]``."""
        self._asked = time.perf_counter()
        beam = float(beam_values.sum())
        if beam < self.floors[len(self.beams)]:
            return False
        self.beams.append(beam)
        return True

    def scored(self, level: int) -> None:
        """Note that a level was scored; the first one comes with the first pass."""
        if level:
            self.level_seconds.append(time.perf_counter() - self._asked)


class LevelDrafter(DraftHooks):
    """Mixed into one of vLLM's proposers, in front of it.

    The first forward of a draft phase is vLLM's own.  It runs the drafter over the accepted tokens (stable KV).  The
    levels after it keep their key/value in a scratch, so that drafting never touches committed pages.
    """

    grows_by_level = True

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any):
        super().__init__(vllm_config, device, runner)
        self.options: GrownOptions = model_drafter(vllm_config.speculative_config.specplug)
        self.runner = runner
        #: ``StepPlan.path_index`` on the drafter's device.
        self.path_index: torch.Tensor | None = None
        self._first_pass: tuple[Any, ...] | None = None
        #: Rows that the drafter has not read, see ``catch_up``.
        self.missed = MissedRows(self.max_num_tokens)

    def follow(self, plan: StepPlan) -> None:
        self.path_index = plan.path_index.to(self.device)

    def finish(self, request_ids: Collection[str]) -> None:
        self.missed.finish(request_ids)

    def load_model(self, target_model: torch.nn.Module) -> None:
        super().load_model(target_model)
        layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase, list(self._draft_attn_layer_names))
        if (odd := next((name for name, layer in layers.items() if not hasattr(layer, "impl")), None)) is not None:
            raise ConfigError(f"no trees are drafted by layers with a recurrent state ({odd}): use another drafter")
        self.draft_layers = {name: layer.impl for name, layer in layers.items()}
        rows = self.options.scratch_rows
        self._scratch = LevelScratch(self.vllm_config, self.draft_layers, rows, self.device)
        keep_output(self.model, self._keep_output)

    def _keep_output(self, output: Any) -> None:
        self._last_output = output

    def _forward(self, **inputs: Any) -> Any:
        """Run the model over the nodes of a level; takes the arguments of a vLLM model that reads hidden states."""
        return self.model(**inputs)

    def _logits(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return logits ``[num_rows, draft_vocab]``, and the target's token id of each, or None: they are the same."""
        raise NotImplementedError

    # ---- drafting paused

    def skip_draft(
        self,
        hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        accepted: AcceptedRows,
    ) -> None:
        """Keep the step's accepted rows for later."""
        if self.runner.use_aux_hidden_state_outputs:
            hidden_states = torch.cat(aux_hidden_states, dim=-1)
        batch, num_reqs = self.runner.input_batch, self.runner.input_batch.num_reqs
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
        table = batch.block_table[self.kv_cache_gid]
        block_table = table.get_device_tensor(batch.num_reqs)[list(places)]
        requests = torch.from_numpy(np.repeat(np.arange(len(taken)), counts))
        query_start = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
        slot_mapping = slots_of(places_of_rows, block_table[requests], table.block_size)
        lens = torch.from_numpy(ends.astype(np.int32)), int(counts.max()), int(ends.max())
        self._read_missed(
            target_token_ids=torch.from_numpy(token_ids),
            target_positions=torch.cat([self._target_positions(*one) for one in ranges], dim=-1),
            target_hidden_states=torch.cat(hidden),
            next_token_ids=torch.from_numpy(batch.token_ids_cpu[list(places), ends]),
            token_indices_to_sample=None,
            common_attn_metadata=draft_metadata(query_start, *lens, block_table, slot_mapping),
            sampling_metadata=batch.sampling_metadata,
        )

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

    def _read(self, **kwargs: Any) -> None:
        """Run vLLM's first forward; takes the arguments of ``propose``."""
        # With no tokens to draft, vLLM's propose is only the re-seeding forward.
        super().propose(**{**kwargs, "num_speculative_tokens": 0})
        self.num_speculative_tokens = self.speculative_config.num_speculative_tokens

    def _read_missed(self, **kwargs: Any) -> None:
        """Read rows that were missed, from which no draft grows; takes the arguments of ``propose``."""
        self._read(**kwargs)

    def propose(self, **kwargs: Any) -> Draft:  # type: ignore[override]
        """Draft one tree per request; vLLM would draft a chain."""
        begin = time.perf_counter()
        self._read(**kwargs)
        first_pass = time.perf_counter() - begin
        assert self._first_pass is not None
        num_rows, rows, metadata = self._first_pass
        score, feed = pair_of(self._last_output)
        levels = self._levels(num_rows, rows, metadata)
        root, growth = DraftFeatures(score[rows], feed[rows]), self._begin_growth(len(rows))
        draft = self._grow(kwargs["next_token_ids"].long(), root, levels.forward, growth)
        return self._end_growth(draft, growth, first_pass, len(kwargs["target_token_ids"]))

    def _levels(self, num_rows: int, rows: torch.Tensor, metadata: CommonAttentionMetadata) -> Any:
        """Make the forwards after the first one, whose newest rows of each request are ``rows``."""
        return EagleLevels(
            self._forward,
            self._scratch,
            self._get_positions(num_rows)[..., rows],
            metadata.seq_lens[: len(rows)],
            metadata.block_table_tensor,
            len(rows),
            level_metadata,
            self._level_positions if self.uses_mrope else None,
        )

    def _begin_growth(self, num_reqs: int) -> Growth:
        """Begin to grow trees: ask how deep they may be."""
        floors = self.limits.floors or [0.0] * (self.options.draft_depth - 1)
        return Growth([max(floor, self.options.level_floor * num_reqs) for floor in floors])

    def _grow(self, root_token_ids: torch.Tensor, root: DraftFeatures, forward: Forward, growth: Growth) -> Draft:
        """Grow the trees level by level."""
        sampling = self.runner.draft_noise.sampling(self.options.draft_depth, self.options.draft_top_k)

        def score_level(number: int, hidden: torch.Tensor, top_k: int) -> Children:
            children = self._score(hidden, top_k, number, sampling)
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

    def _end_growth(self, draft: Draft, growth: Growth, first_pass: float, num_read: int) -> Draft:
        """Report the growth, and remove drafts, see ``_without_unread``.

        Args:
            draft: the trees.
            growth: of these.
            first_pass: seconds of the first forward.
            num_read: rows that it read.
        """
        record = self.record
        record.read_seconds, record.num_read, record.beams = first_pass, num_read, growth.beams
        record.level_seconds, record.level_rows = growth.level_seconds, len(draft.log_values) * self.options.draft_top_k
        return self._without_unread(draft)

    def _without_unread(self, draft: Draft) -> Draft:
        """Remove the drafts of requests with rows that the drafter has not read."""
        if not (unread := self.missed.unread):
            return draft
        read = torch.tensor([request_id not in unread for request_id in self.runner.input_batch.req_ids])
        return prune(draft, read[:, None].expand_as(draft.log_values))

    def _level_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Put M-RoPE positions of a level where the compiled drafter reads them, see ``EagleLevels``."""
        self._set_positions(positions.shape[1], positions)
        return self._get_positions(positions.shape[1])

    def _score(
        self, hidden: torch.Tensor, top_k: int, level: int = 0, sampling: DraftSampling | None = None
    ) -> Children:
        logits, draft_ids = self._logits(hidden)
        if sampling is None:
            return likeliest(logits, top_k, draft_ids)
        return sampling.children(logits, level, top_k, draft_ids)


def slots_of(positions: torch.Tensor, block_rows: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return slots int64 ``[n]`` of positions int64 ``[n]``; ``[n, max_blocks]``: each one's block table row."""
    blocks = block_rows.gather(1, (positions // block_size).unsqueeze(1)).squeeze(1)
    return blocks.long() * block_size + positions % block_size


def plain_positions(positions: torch.Tensor) -> torch.Tensor:
    """Return the positions that vLLM gives a drafter without M-RoPE: ``[num_rows]``, M-RoPE's first component."""
    return positions if positions.dim() == 1 else positions[0]


def draft_metadata(
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> CommonAttentionMetadata:
    """Make metadata of a drafter's forward; the tensors are in CPU memory."""
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
