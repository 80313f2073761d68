"""Verification on the V2 runner: vLLM's sampler at every tree row, and a walk over the sampled tokens.

vLLM keys its noise by (seed, position), and tree rows have the positions of plain decoding.  So the token sampled at a
row of the walked path is the one that plain decoding would sample there.  All rows are sampled in parallel on the
device, and the walk only looks tokens up.  If a request's logits depend on its earlier tokens (penalties, bad words, a
thinking budget, custom processors), the batch is sampled depth by depth, on rows that the processors see as a chain.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    RejectionSampler,
    _iter_request_chunks,
    get_max_chunk_logits,
)

from vllm_specplug.core.walk import walk_exact
from vllm_specplug.gpu import step
from vllm_specplug.gpu.kernels.row_tokens import row_tokens
from vllm_specplug.gpu.late_learning import LateLearning
from vllm_specplug.gpu.late_trace import LateTrace
from vllm_specplug.gpu.settling import Settling, VerifiedRows
from vllm_specplug.gpu.trees import DeviceTrees
from vllm_specplug.types import Walk


class TreeRejectionSampler(RejectionSampler):
    """Replaces vLLM's rejection sampler.

    Args:
        sampler, spec_config, device: vLLM's.
        runner: the ``TreeRunner``, which commits a walk.
        trees: the staged trees.
        settling: chooses tokens before the exact walk; None: all are sampled.
        trace: receives the verified trees.
        learning: receives what was emitted; None: nothing learns.
    """

    _learning: LateLearning | None = None

    def __init__(
        self,
        sampler: Any,
        spec_config: Any,
        device: torch.device,
        runner: Any,
        trees: DeviceTrees,
        settling: Settling | None = None,
        trace: LateTrace | None = None,
        learning: LateLearning | None = None,
    ):
        super().__init__(sampler, spec_config, device)
        self.runner, self.trees, self._settling, self._trace = runner, trees, settling, trace
        self._learning = learning

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        num_nans = get_num_nans(logits) if self.sampler.compute_nans else None
        token_ids, pos = self._row_tokens(input_batch)
        if invalid_drafts is not None:  # nodes whose rows have no grammar mask
            token_ids = token_ids.masked_fill(invalid_drafts, -1)
        rows = VerifiedRows(logits, input_batch, token_ids, pos)
        walk, num_rejected = step.walk(self, self.trees, rows)
        self.runner.commit(walk)
        if self._trace is not None and self._trace.is_on:
            self._trace.add(input_batch.req_ids, self.trees.batch_tree(input_batch, token_ids), walk)
        if self._learning is not None:
            self._learning.verified(input_batch, walk)
        return SamplerOutput(
            sampled_token_ids=walk.output_token_ids,
            logprobs_tensors=self._logprobs(rows, walk),
            num_nans=num_nans,
            num_sampled=walk.num_emitted,
            num_rejected=num_rejected,
        )

    def choose(self, rows: VerifiedRows) -> torch.Tensor | None:
        """Return the tokens that typical acceptance or rejection chose, see ``Settling``; None: all are sampled."""
        return None if self._settling is None else self._settling(rows)

    def _row_tokens(self, input_batch: InputBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and positions of the sampled rows, see ``row_tokens``."""
        return row_tokens(
            input_batch.logits_indices,
            input_batch.expanded_idx_mapping,
            input_batch.expanded_local_pos,
            input_batch.input_ids,
            input_batch.positions,
            self.trees.depths,
            self.sampler.req_states.prefill_len.gpu,
        )

    def needs_history(self, input_batch: InputBatch) -> bool:
        """Return whether a row's logits depend on the tokens before it; reads CPU values only."""
        requests, sampler = input_batch.idx_mapping_np, self.sampler
        if not sampler.needs_logits_processing[requests].any():
            return False
        for processor in sampler.logits_processors:
            if isinstance(processor, PenaltiesState):
                used = processor.use_penalty[requests].any()
            elif isinstance(processor, BadWordsState):
                used = processor.num_bad_words.np[requests].any()
            else:
                used = not isinstance(processor, LogitBiasState)
            if used:
                return True
        thinking = sampler.thinking_budget_state
        return thinking.enabled and bool(thinking.use_thinking_budget[requests].any())

    def sample_all(self, rows: VerifiedRows, chosen: torch.Tensor | None) -> torch.Tensor:
        """Sample a token for every row, int64 ``[num_logits]``, unless one was chosen.

        By chunks of requests, as vLLM bounds its copies of logits.
        """
        logits, input_batch = rows.logits, rows.batch
        offsets = input_batch.cu_num_logits_np
        sampled = []
        for first, last in _iter_request_chunks(offsets, get_max_chunk_logits(logits.shape[1])):
            part = slice(int(offsets[first]), int(offsets[last]))
            tokens, _ = self.sampler.sample(
                logits[part],
                input_batch.expanded_idx_mapping[part],
                input_batch.idx_mapping[first:last],
                input_batch.idx_mapping_np[first:last],
                rows.pos[part],
                rows.token_ids[part],
                input_batch.expanded_local_pos[part],
                input_batch.seq_lens_cpu_upper_bound.numpy()[first:last],
            )
            sampled.append(tokens.view(-1))
        sampled = torch.cat(sampled)
        if chosen is None:
            return sampled
        of_rows = chosen[_requests_of_rows(input_batch), input_batch.expanded_local_pos.long()]
        return torch.where(of_rows >= 0, of_rows, sampled)

    def walk_by_depth(
        self, verified: VerifiedRows, chosen: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Walk by ``walk_exact``; at each depth the processors see the path so far, as if it were drafted as a chain.

        By chunks of requests too, since the chains of a deep tree have many rows.
        """
        logits, input_batch = verified.logits, verified.batch
        first = input_batch.cu_num_logits[:-1].long()
        num_reqs, max_rows = first.shape[0], get_max_chunk_logits(logits.shape[1])
        visited: list[torch.Tensor] = []

        def sample(rows: torch.Tensor, active: torch.Tensor, depth: int) -> torch.Tensor:
            visited.append(first + rows)
            chains, length = torch.stack(visited, dim=1), depth + 1
            local = torch.arange(length, dtype=torch.int32, device=chains.device)
            at_once = max(1, max_rows // length)
            sampled = []
            for begin in range(0, num_reqs, at_once):
                part = slice(begin, min(begin + at_once, num_reqs))
                chain = chains[part].flatten()
                tokens, _ = self.sampler.sample(
                    logits[chain],
                    input_batch.idx_mapping[part].repeat_interleave(length),
                    input_batch.idx_mapping[part],
                    input_batch.idx_mapping_np[part],
                    verified.pos[chain],
                    verified.token_ids[chain],
                    local.repeat(chains[part].shape[0]),
                    input_batch.seq_lens_cpu_upper_bound.numpy()[part],
                )
                sampled.append(tokens.view(-1, length)[:, -1])
            tokens = torch.cat(sampled)
            if chosen is None:
                return tokens
            of_rows = chosen.gather(1, rows.unsqueeze(1)).squeeze(1)
            return torch.where(of_rows >= 0, of_rows, tokens)

        tree = self.trees.batch_tree(input_batch, verified.token_ids)
        walk = walk_exact(tree, sample, static_depth=self.trees.max_depth)
        return walk.output_token_ids.long(), walk.path_rows, walk.num_emitted.to(torch.int32)

    def _logprobs(self, rows: VerifiedRows, walk: Walk) -> Any:
        """Compute vLLM's logprobs on the logits in path order."""
        logits, input_batch = rows.logits, rows.batch
        max_num_logprobs = self.sampler.sampling_states.max_num_logprobs(input_batch.idx_mapping_np)
        if max_num_logprobs == NO_LOGPROBS:
            return None
        offsets = input_batch.cu_num_logits
        row = torch.arange(logits.shape[0], device=logits.device)
        request = _requests_of_rows(input_batch)
        path = walk.path_rows[request, input_batch.expanded_local_pos.long()]
        in_path = torch.where(path >= 0, offsets[request].long() + path, row)
        logits = logits[in_path]
        if self.sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES:
            logits = self.sampler.apply_sampling_params(
                logits,
                input_batch.expanded_idx_mapping,
                input_batch.idx_mapping,
                input_batch.idx_mapping_np,
                rows.pos[in_path],
                rows.token_ids[in_path],
                input_batch.expanded_local_pos,
                input_batch.seq_lens_cpu_upper_bound.numpy(),
            )
        return self._get_logprobs_tensors(
            *(walk.output_token_ids, walk.num_emitted, logits, offsets),
            *(input_batch.cu_num_logits_np, max_num_logprobs),
        )


def _requests_of_rows(input_batch: InputBatch) -> torch.Tensor:
    """Return the request of each sampled row: its place in the batch, int64 ``[num_logits]``."""
    rows = torch.arange(input_batch.expanded_local_pos.shape[0], device=input_batch.cu_num_logits.device)
    return torch.searchsorted(input_batch.cu_num_logits[1:].long(), rows, right=True)
