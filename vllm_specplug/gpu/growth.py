"""Draft phases as recorded CUDA graphs, by batch size; without CUDA they run directly."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from vllm.distributed.parallel_state import graph_capture
from vllm.platforms import current_platform

from vllm_specplug.gpu.graph_sizes import request_counts

logger = logging.getLogger("vllm_specplug")

#: ``grow(num_reqs, slots, *inputs)``, inputs ``[num_reqs, ...]`` -> token ids and parents, ``[num_reqs, num_rows]``
#: each.  The result of a request with slot -1 is not used.  All other tensors that it reads keep their addresses.
Grow = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Growth:
    """Calls ``grow``, or replays a graph of it.

    Args:
        grow: drafts the trees of a batch.
        max_num_reqs: the largest batch.

    Attributes:
        at_once: requests that one call of ``grow`` may have; larger batches are drafted in several calls.
    """

    def __init__(self, grow: Grow, max_num_reqs: int):
        self._grow, self._max_num_reqs, self.at_once = grow, max_num_reqs, max_num_reqs
        self._inputs: tuple[torch.Tensor, ...] = ()
        self._recorded: dict[int, tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, torch.Tensor]]] = {}

    def record(self, *inputs: torch.Tensor) -> None:
        """Record a graph for each of ``request_counts``, up to ``at_once`` requests.

        The graphs share the memory of vLLM's.  Inside vLLM's context, communication between ranks is recorded too.

        Args:
            inputs: ``[>= at_once, ...]``, slots first, as wide as any input; the graphs keep them as their own.  An
                input that is already there when ``grow`` is called is not copied.
        """
        self._inputs = inputs
        sizes, given = request_counts(self.at_once), {}
        for size in reversed(sizes):
            given[size] = [own[:size] for own in inputs]
            self._grow(size, *given[size])  # compiles the kernels; vLLM's context would leave communication out
        torch.cuda.synchronize()
        pool = current_platform.get_global_graph_pool()
        with graph_capture(device=inputs[0].device) as context:
            for size, parts in given.items():
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=context.stream):
                    result = self._grow(size, *parts)
                self._recorded[size] = (graph, result)
        logger.info("tree growth: recorded graphs for %s requests", sizes)

    def forget(self) -> None:
        """Delete the graphs, because the tensors that they read may get other addresses."""
        self._inputs, self._recorded = (), {}

    def __call__(self, num_reqs: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft; return token ids and parents, int64 ``[num_reqs, num_rows]``, valid until the next call."""
        if num_reqs <= self.at_once:
            return self._draft(num_reqs, inputs)
        parts = []
        for begin in range(0, num_reqs, self.at_once):
            part = slice(begin, min(begin + self.at_once, num_reqs))
            token_ids, parents = self._draft(part.stop - begin, [values[part] for values in inputs])
            parts.append((token_ids.clone(), parents.clone()))  # the next replay overwrites them
        token_ids, parents = zip(*parts, strict=True)
        return torch.cat(token_ids), torch.cat(parents)

    def _draft(self, num_reqs: int, inputs: tuple[torch.Tensor, ...] | list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        size = min((size for size in self._recorded if size >= num_reqs), default=None)
        pairs = list(zip(self._inputs, inputs, strict=False))
        if size is None or any(given.shape[1:] > own.shape[1:] for own, given in pairs):
            return self._grow(num_reqs, *(values[:num_reqs] for values in inputs))
        for own, given in pairs:
            if own.data_ptr() != given.data_ptr():
                own[tuple(slice(length) for length in (num_reqs, *given.shape[1:]))].copy_(given[:num_reqs])
        if size > num_reqs:
            self._inputs[0][num_reqs:size].fill_(-1)
        graph, (token_ids, parents) = self._recorded[size]
        graph.replay()
        return token_ids[:num_reqs], parents[:num_reqs]
