"""The growth of the trees as recorded CUDA graphs, one per batch size; elsewhere as it is."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

logger = logging.getLogger("vllm_specplug")

#: ``grow(num_reqs, block_table [num_reqs, max_blocks])`` -> token ids and parents, ``[num_reqs, num_rows]`` each; all
#: else it reads lies in places that stay.
Grow = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Growth:
    """Calls ``grow``, or replays what it did.

    Args:
        grow: drafts the trees of a batch.
        max_num_reqs: the largest batch.
    """

    def __init__(self, grow: Grow, max_num_reqs: int):
        self._grow, self._max_num_reqs = grow, max_num_reqs
        self._block_table: torch.Tensor | None = None
        self._recorded: dict[int, tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, torch.Tensor]]] = {}

    def record(self, block_table: torch.Tensor) -> None:
        """Record graphs for powers of two of requests.

        Args:
            block_table: int32 ``[max_num_reqs, max_blocks]``; the graphs' own, all zeros: requests that only fill up a
                graph read block 0.
        """
        sizes = {self._max_num_reqs, *(1 << i for i in range(self._max_num_reqs.bit_length()))}
        self._block_table, pool = block_table, torch.cuda.graph_pool_handle()
        for size in sorted((size for size in sizes if size <= self._max_num_reqs), reverse=True):
            self._grow(size, block_table[:size])  # compiles what is to be recorded
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                result = self._grow(size, block_table[:size])
            self._recorded[size] = (graph, result)
        logger.info("tree growth: recorded graphs for %s requests", sorted(self._recorded))

    def __call__(self, num_reqs: int, block_table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and parents, int64 ``[num_reqs, num_rows]``; valid until the next call."""
        size = min((size for size in self._recorded if size >= num_reqs), default=None)
        if size is None or self._block_table is None or block_table.shape[1] > self._block_table.shape[1]:
            return self._grow(num_reqs, block_table)
        self._block_table[:num_reqs, : block_table.shape[1]].copy_(block_table[:num_reqs])
        graph, (token_ids, parents) = self._recorded[size]
        graph.replay()
        return token_ids[:num_reqs], parents[:num_reqs]
