"""Measures at start how long rounds take, by shape and number of requests.

Whole steps run, as the scheduler would ask for them: verification, walk, commit and draft phase, from the graphs that
serve.  On CUDA events on the device are read once, at the end.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch
from vllm import SamplingParams
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tp_group
from vllm.logger import init_logger
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from vllm_specplug.budget import saved
from vllm_specplug.budget.cost import RoundCost
from vllm_specplug.config import ConfigError
from vllm_specplug.gpu.budget import device_name
from vllm_specplug.gpu.rounds import facts, most_rows
from vllm_specplug.utils.files import kept_path

# vLLM shows its own loggers only, and a start that takes longer is to say why.
logger = init_logger("vllm.vllm_specplug")

#: Timed steps of each shape and number of requests, after one that is not timed.
TIMES = 3
#: Tokens of context that every request has, if the model allows.
CONTEXT = 1024


def measure_if_unknown(worker: Any) -> None:
    """Measure the step times of this machine and save them, unless they were saved before; all ranks do the same.

    Raises:
        ConfigError: they cannot be saved, and the scheduler would not find them.
    """
    runner = worker.model_runner
    known, most = facts(runner.vllm_config, device_name()), runner.max_num_reqs
    found = saved.load(RoundCost, known, most) is not None
    if get_tp_group().broadcast_object(found, src=0):
        return
    began = time.perf_counter()
    cost = RoundCost(StepMeasurement(worker).measure(), most)
    path = saved.save(known, cost) if get_tensor_model_parallel_rank() == 0 else None
    if (path := get_tp_group().broadcast_object(path, src=0)) is None:
        raise ConfigError(
            f"budget='measured' cannot keep its step times in {kept_path(saved.ROUNDS, known).parent} (found: not "
            "writable): set XDG_CACHE_HOME to a folder that is, or use budget='fixed'"
        )
    logger.info("vllm-specplug: step times measured in %.1f s, kept in %s", time.perf_counter() - began, path)


class StepMeasurement:
    """Runs steps for requests of its own.  They share the blocks of their context, which costs no memory.

    Args:
        worker: with a KV cache, warmed up.

    Raises:
        ConfigError: requests are too short to be timed.
    """

    def __init__(self, worker: Any):
        self._worker, self._runner = worker, worker.model_runner
        self._most_rows = most_rows(self._runner.speculative_config.specplug, self._runner.max_num_tokens)
        #: By nodes of a shape, the levels of its trees.
        self._depths = {0: 0} | self._runner.speculator.depths
        self._emitted = max(self._depths.values()) + 1  # most tokens of a request and step
        room = (TIMES + 1) * self._emitted + max(self._depths) + 2
        self._context = min(CONTEXT, self._runner.max_model_len - room)
        if self._context < 1:
            raise ConfigError(
                f"budget='measured' needs --max-model-len {room + 1} or more (found {self._runner.max_model_len}): "
                "raise it, lower num_speculative_tokens, or use budget='fixed'"
            )
        cache = self._runner.kv_cache_config
        sizes = [group.kv_cache_spec.block_size for group in cache.kv_cache_groups]
        self._blocks = tuple([min(1, cache.num_blocks - 1)] * -(-(self._context + room) // size) for size in sizes)

    def measure(self) -> dict[int, dict[int, float]]:
        """Return the seconds of a round by nodes of its shape and number of requests."""
        found: dict[int, dict[int, float]] = {nodes: {} for nodes in self._depths}
        self._runner.kv_connector.set_disabled(True)
        try:
            for count in _request_counts(self._runner.max_num_reqs):
                for nodes in sorted(self._depths):
                    # The first rank's clock decides for all.
                    if get_tp_group().broadcast_object(self._is_worth_it(nodes, count, found), src=0):
                        found[nodes][count] = self._seconds(nodes, count)
        finally:
            self._runner.kv_connector.set_disabled(False)
        return {nodes: seconds for nodes, seconds in found.items() if seconds}

    def _is_worth_it(self, nodes: int, num_reqs: int, found: dict[int, dict[int, float]]) -> bool:
        """Return whether to time a shape: where it cannot pay, a larger batch does not change that, and its table goes
        on with its slope."""
        if num_reqs * (nodes + 1) > (self._most_rows if nodes else self._runner.max_num_tokens):
            return False
        last = max(found[nodes], default=0)
        # It would pay if every level of its tree were accepted.
        return not last or nodes == 0 or found[nodes][last] < (self._depths[nodes] + 1) * found[0][last]

    def _seconds(self, nodes: int, num_reqs: int) -> float:
        names = [f"_specplug_timed_{place}" for place in range(num_reqs)]
        self._run(self._first_step(names, nodes))
        marks = []
        for step in range(TIMES + 1):
            self._run(self._next_step(names, nodes, step))
            marks.append(self._mark())
        seconds = self._fastest(marks)
        closing = SchedulerOutput.make_empty()
        closing.finished_req_ids = set(names)
        self._worker.execute_model(closing)
        return seconds

    def _first_step(self, names: list[str], nodes: int) -> SchedulerOutput:
        """Read the last token of a prompt whose other tokens are taken for cached."""
        output, text = SchedulerOutput.make_empty(), [1] * (self._context + 1)
        output.scheduled_new_reqs = [
            NewRequestData(
                req_id=name,
                prompt_token_ids=text,
                mm_features=[],
                sampling_params=SamplingParams(temperature=0.0, max_tokens=64),
                pooling_params=None,
                block_ids=self._blocks,
                num_computed_tokens=self._context,
                lora_request=None,
                prefill_token_ids=text,
            )
            for name in names
        ]
        output.num_scheduled_tokens = dict.fromkeys(names, 1)
        output.total_num_scheduled_tokens = len(names)
        output.num_spec_tokens_to_schedule = nodes
        return output

    def _next_step(self, names: list[str], nodes: int, step: int) -> SchedulerOutput:
        output, cached = SchedulerOutput.make_empty(), CachedRequestData.make_empty()
        cached.req_ids = list(names)
        cached.new_token_ids = [[] for _ in names]
        cached.new_block_ids = [None] * len(names)
        cached.num_computed_tokens = [self._context + 1 + step * self._emitted] * len(names)  # at most
        cached.num_output_tokens = [1 + step * self._emitted] * len(names)
        output.scheduled_cached_reqs = cached
        output.num_scheduled_tokens = dict.fromkeys(names, nodes + 1)
        output.total_num_scheduled_tokens = len(names) * (nodes + 1)
        if nodes:
            output.scheduled_spec_decode_tokens = {name: [-1] * nodes for name in names}
        output.num_spec_tokens_to_schedule = nodes
        return output

    def _run(self, output: SchedulerOutput) -> None:
        self._worker.execute_model(output)
        self._worker.sample_tokens(None)

    # ---- time

    def _mark(self) -> Any:
        if self._runner.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _fastest(self, marks: list[Any]) -> float:
        """Return the shortest time between two marks: disturbances only add time."""
        if self._runner.device.type != "cuda":
            return min(second - first for first, second in pairwise(marks))
        marks[-1].synchronize()
        return min(first.elapsed_time(second) for first, second in pairwise(marks)) / 1e3


def _request_counts(most: int) -> list[int]:
    """Return the numbers of requests to time: powers of two, and the largest."""
    return [1 << i for i in range(most.bit_length()) if 1 << i < most] + [most]
