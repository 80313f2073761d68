"""Draft phases as recorded CUDA graphs, one per batch size; without CUDA they run directly."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

logger = logging.getLogger("vllm_specplug")

#: ``grow(num_reqs, *inputs)``, inputs ``[num_reqs, ...]`` -> token ids and parents, ``[num_reqs, num_rows]`` each.  All
#: other tensors that it reads keep their addresses.
Grow = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Growth:
    """Calls ``grow``, or replays a graph of it.

    Args:
        grow: drafts the trees of a batch.
        max_num_reqs: the largest batch.
    """

    def __init__(self, grow: Grow, max_num_reqs: int):
        self._grow, self._max_num_reqs = grow, max_num_reqs
        self._inputs: tuple[torch.Tensor, ...] = ()
        self._recorded: dict[int, tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, torch.Tensor]]] = {}

    def record(self, *inputs: torch.Tensor) -> None:
        """Record graphs for 1, 2, 4, ... and ``max_num_reqs`` requests.

        Args:
            inputs: zeros ``[max_num_reqs, ...]``, as wide as any input; the graphs keep them as their own.  Unused
                requests of a graph read the zeros, or the values of an earlier batch.
        """
        sizes = {self._max_num_reqs, *(1 << i for i in range(self._max_num_reqs.bit_length()))}
        self._inputs, pool = inputs, torch.cuda.graph_pool_handle()
        for size in sorted((size for size in sizes if size <= self._max_num_reqs), reverse=True):
            given = [own[:size] for own in inputs]
            self._grow(size, *given)  # compiles the kernels before recording
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                result = self._grow(size, *given)
            self._recorded[size] = (graph, result)
        logger.info("tree growth: recorded graphs for %s requests", sorted(self._recorded))

    def forget(self) -> None:
        """Delete the graphs, because the tensors that they read may get other addresses."""
        self._inputs, self._recorded = (), {}

    def __call__(self, num_reqs: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft; return token ids and parents, int64 ``[num_reqs, num_rows]``, valid until the next call."""
        size = min((size for size in self._recorded if size >= num_reqs), default=None)
        pairs = list(zip(self._inputs, inputs, strict=False))
        if size is None or any(given.shape[1:] > own.shape[1:] for own, given in pairs):
            return self._grow(num_reqs, *inputs)
        for own, given in pairs:
            own[tuple(slice(length) for length in (num_reqs, *given.shape[1:]))].copy_(given[:num_reqs])
        graph, (token_ids, parents) = self._recorded[size]
        graph.replay()
        return token_ids[:num_reqs], parents[:num_reqs]
