"""Full CUDA graphs of trees, beside the graphs that vLLM's manager records.

vLLM's capture sizes stay as they are: they also bound its piecewise graphs (to which prompts are padded) and the
buffers of its attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from vllm_specplug.gpu.graph_sizes import request_counts
from vllm_specplug.gpu.rounds import most_rows, shapes


def wrap_init_candidates(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap ``CudaGraphManager._init_candidates``: the manager then records a graph for each batch of trees."""

    @functools.wraps(original)
    def init_candidates(self):
        original(self)
        config = self.vllm_config.speculative_config
        if getattr(config, "specplug", None) is not None and _records_steps(self, config):
            _replace_full_graphs(self, list(_tree_graphs(self, config)))

    return init_candidates


def _records_steps(manager: Any, config: Any) -> bool:
    """Return whether the manager records full graphs of whole trees; that of vLLM's chain drafts does not."""
    mode, sizes = manager.cudagraph_mode, manager.compilation_config.cudagraph_capture_sizes
    records_full = mode and sizes and mode.separate_routine() and mode.decode_mode() == CUDAGraphMode.FULL
    return bool(records_full) and manager.decode_query_len == 1 + config.num_speculative_tokens


def _tree_graphs(manager: Any, config: Any) -> Iterator[BatchExecutionDescriptor]:
    for width in _widths(config.specplug):
        for num_reqs in _counts(manager, config, width):
            for num_loras in manager.lora_capture_cases:
                yield BatchExecutionDescriptor(
                    cg_mode=CUDAGraphMode.FULL,
                    num_tokens=num_reqs * width,
                    num_reqs=num_reqs,
                    uniform_token_count=width,
                    num_active_loras=num_loras,
                )


def _widths(options: Any) -> list[int]:
    """Return the rows of a request in each kind of step: a plain one (of a measured budget) and those with trees."""
    return [1] * (options.budget == "measured") + [1 + shape.nodes for shape in shapes(options)]


def _counts(manager: Any, config: Any, width: int) -> Iterable[int]:
    """Return the numbers of requests to record for.

    Plain steps have vLLM's capture sizes, and the most requests if these leave them without a graph.  Where the user
    chose the sizes, trees have them too, and none are added.
    """
    sizes, scheduler = manager.compilation_config.cudagraph_capture_sizes, manager.vllm_config.scheduler_config
    num_tokens = scheduler.max_num_batched_tokens
    if width > 1:
        num_tokens = most_rows(config.specplug, num_tokens)
    most = min(manager.max_num_reqs, num_tokens // width)
    if width > 1 and not config.has_users_graph_sizes:
        return request_counts(most) if most else []
    largest = manager.compilation_config.max_cudagraph_capture_size // width
    counts = {-(-size // width) for size in sizes if -(-size // width) <= min(most, largest)}
    if most <= largest and not config.has_users_graph_sizes:
        counts.add(most)
    return sorted(counts)


def _replace_full_graphs(manager: Any, full: list[BatchExecutionDescriptor]) -> None:
    """Replace vLLM's full graphs; for each batch the smallest graph of its width comes first."""
    manager._capture_descs[CUDAGraphMode.FULL] = sorted(full, key=lambda graph: graph.num_tokens, reverse=True)
    known, manager._candidates = manager._candidates, {}
    for (num_loras, _), graphs in groupby(sorted(full, key=_kind), lambda graph: _kind(graph)[:2]):
        begin = 0
        for graph in graphs:
            for num_tokens in range(begin, graph.num_tokens + 1):
                manager._candidates.setdefault((num_tokens, num_loras), []).append(graph)
            begin = graph.num_tokens + 1
    for key, graphs in known.items():
        others = [graph for graph in graphs if graph.cg_mode != CUDAGraphMode.FULL]
        manager._candidates.setdefault(key, []).extend(others)


def _kind(graph: BatchExecutionDescriptor) -> tuple[int, int, int]:
    return graph.num_active_loras, graph.uniform_token_count or 0, graph.num_tokens
