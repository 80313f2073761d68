"""The exact walk by vLLM's own sampler: one call per depth on a ``[num_reqs, vocab]`` batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS
from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata

from vllm_specplug.cpu.kernels.tree_ops import greedy_walk, walks_greedily
from vllm_specplug.types import PADDING, TokenTree, Walk


def is_argmax(metadata: SamplingMetadata) -> bool:
    """Whether vLLM's sampler returns the argmax of the unchanged logits of every row, and nothing else."""
    holder = metadata.thinking_budget_state_holder
    return (
        metadata.all_greedy
        and metadata.max_num_logprobs is None
        and not metadata.logprob_token_ids
        and metadata.no_penalties
        and metadata.allowed_token_ids_mask is None
        and not metadata.bad_words_token_ids
        and (holder is None or not holder.has_tracked_requests())
        and all(_is_idle(processor) for processor in metadata.logitsprocs.all)
    )


def _is_idle(processor: Any) -> bool:
    """Whether a logits processor changes nothing in a greedy batch, so that its state need not be updated."""
    kind = type(processor)  # a custom subclass may do more
    if kind is MinTokensLogitsProcessor:
        return not processor.min_toks
    if kind is LogitBiasLogitsProcessor:
        return not processor.biases
    return kind in BUILTIN_LOGITS_PROCESSORS and processor.is_argmax_invariant()


class SampledWalk:
    """Walks a batch of trees by vLLM's sampler, as if each visited node were a plain decoding step.

    Before each depth the accepted tokens are appended to the requests' output histories and the logits processors are
    updated, so penalties, bad words, min_tokens and the like work as in plain decoding.  A request whose walk has ended
    draws no more numbers from its generator.

    Args:
        sampler: vLLM's.
        sampling_metadata: vLLM's, of the batch.
        histories: by request, its output tokens; changed during the walk and restored after it.  None: not needed.

    Attributes:
        drawn: by batch index, the state of the request's generator after each token of its path.
    """

    def __init__(self, sampler: Any, sampling_metadata: SamplingMetadata, histories: list[list[int] | None]):
        self.sampler = sampler
        self.sampling_metadata = sampling_metadata
        self.histories = histories
        self.drawn: dict[int, list[torch.Tensor]] = {}

    def __call__(
        self, tree: TokenTree, logits: torch.Tensor, first_rows: torch.Tensor, active: torch.Tensor
    ) -> tuple[Walk, SamplerOutput]:
        """Walk the trees.

        Args:
            tree: the verified trees.
            logits: ``[num_logits_rows, vocab]``; not modified.
            first_rows: int64 ``[num_reqs]``; row of each request's root in ``logits``.
            active: bool ``[num_reqs]``; requests to sample.

        Returns:
            The walk, and vLLM's sampler output: int32 ``[num_reqs, max_emitted]`` padded with -1.
        """
        if is_argmax(self.sampling_metadata) and walks_greedily(logits):
            walk = greedy_walk(tree, logits, first_rows, active, tree.token_ids.shape[1])
            return walk, SamplerOutput(walk.output_token_ids, None)
        # vLLM cannot split full-vocabulary logprobs by rows: emit one token per step.
        max_emitted = 1 if self.sampling_metadata.max_num_logprobs == -1 else tree.token_ids.shape[1]
        # ``walk.walk_exact`` on lists: on a CPU this takes a microsecond per node instead of twenty tensor operations.
        token_ids, parents = tree.token_ids.tolist(), tree.parents.tolist()
        running, rows = active.tolist(), [0] * len(token_ids)
        logprobs: list[LogprobsTensors | None] = []
        emitted: list[list[int]] = []
        path: list[list[int]] = []
        try:
            while len(emitted) < max_emitted and (not emitted or any(running)):
                if emitted:
                    self._remember(emitted[-1])
                output = self._sample(_rows_of(logits, first_rows, rows), running, len(emitted))
                logprobs.append(output.logprobs_tensors)
                path.append([row if on or not emitted else PADDING for row, on in zip(rows, running, strict=True)])
                sampled = output.sampled_token_ids[:, 0].tolist()
                emitted.append([token if on else PADDING for token, on in zip(sampled, running, strict=True)])
                for request, token in enumerate(emitted[-1]):
                    child = _find_child(token_ids[request], parents[request], rows[request], token)
                    running[request] = child is not None
                    rows[request] = rows[request] if child is None else child
        finally:
            self._forget(emitted[:-1])
        output_token_ids = np.ascontiguousarray(np.array(emitted, dtype=np.int32).T)
        path_rows = np.ascontiguousarray(np.array(path).T)
        num_emitted = (output_token_ids != PADDING).sum(axis=1)
        output_token_ids = torch.from_numpy(output_token_ids)
        walk = Walk(output_token_ids, torch.from_numpy(path_rows), torch.from_numpy(num_emitted))
        return walk, SamplerOutput(output_token_ids, _stack(logprobs))

    def _sample(self, logits: torch.Tensor, running: list[bool], depth: int) -> SamplerOutput:
        """Sample one token per request; only running requests draw from their generators."""
        metadata = self.sampling_metadata
        generators = {i: generator for i, generator in metadata.generators.items() if running[i]}
        output = self.sampler(
            logits=logits,
            sampling_metadata=replace(metadata, generators=generators, spec_token_ids=None),
        )
        for i, generator in generators.items():
            self.drawn.setdefault(i, []).append(generator.get_state())
        return output

    def _remember(self, token_ids: list[int]) -> None:
        """Append one token per request to the histories, and update the logits processors."""
        for history, token_id in zip(self.histories, token_ids, strict=True):
            if token_id >= 0 and history is not None:
                history.append(token_id)
        for processor in self.sampling_metadata.logitsprocs.all:
            processor.update_state(None)

    def _forget(self, emitted: list[list[int]]) -> None:
        """Remove the appended tokens: vLLM appends them itself after the step."""
        for index, history in enumerate(self.histories):
            count = sum(token_ids[index] >= 0 for token_ids in emitted)
            if count and history is not None:
                del history[-count:]


def _rows_of(logits: torch.Tensor, first_rows: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Return one row per request that vLLM's sampler may write to: it works in place on float32, else on a copy."""
    if len(rows) == 1 and logits.dtype != torch.float32:  # a view suffices
        row = int(first_rows[0]) + rows[0]
        return logits[row : row + 1]
    return logits[first_rows + torch.tensor(rows)]


def _find_child(token_ids: list[int], parents: list[int], row: int, token: int) -> int | None:
    """Find the first child of ``row`` with this token; None if there is none, or the token is ``PADDING``."""
    if token == PADDING:
        return None
    for child in range(row + 1, len(parents)):
        if parents[child] == row and token_ids[child] == token:
            return child
    return None


def _stack(logprobs: list[LogprobsTensors | None]) -> LogprobsTensors | None:
    """Stack logprobs per depth into request-major rows ``[num_reqs * max_emitted, ...]``, as vLLM expects them."""
    if not logprobs or logprobs[0] is None:
        return None
    if len(logprobs) == 1:
        return logprobs[0]
    return LogprobsTensors(
        *(
            torch.stack([getattr(depth, name) for depth in logprobs], dim=1).flatten(0, 1)
            for name in ("logprob_token_ids", "logprobs", "selected_token_ranks")
        )
    )
