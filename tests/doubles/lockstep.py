"""Data-parallel ranks of a mixture-of-experts model in lockstep on a CPU: exchanges between experts that vLLM's CPU
communicator lacks, and programs with a process for each rank."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.models import registry
from vllm.utils.network_utils import get_open_port

_num_exchanges = 0


def exchanges(_worker: Any) -> int:
    """Return how often this rank has sent rows to the experts of others."""
    return _num_exchanges


def _all_gatherv(self: Any, given: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    global _num_exchanges
    _num_exchanges += 1
    assert dim == 0
    if isinstance(given, torch.Tensor):
        return _gather(self, given, sizes)
    return [_gather(self, one, sizes) for one in given]


def _gather(self: Any, own: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
    """Return the rows of all ranks; each has its own number."""
    parts = []
    for place, rank in enumerate(self.ranks):
        size = len(own) if sizes is None else sizes[place]
        part = own.contiguous() if place == self.rank_in_group else own.new_empty(size, *own.shape[1:])
        assert len(part) == size
        dist.broadcast(part, src=rank, group=self.cpu_group)
        parts.append(part)
    return torch.cat(parts)


def _reduce_scatterv(self: Any, given: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    assert dim == 0
    total = given.clone()
    dist.all_reduce(total, group=self.cpu_group)
    sizes = sizes or [len(given) // self.world_size] * self.world_size
    return total.split(sizes)[self.rank_in_group].clone()


def use_exchanges() -> None:
    """Let CPU ranks send the rows of a batch to all experts, by gloo."""
    CpuCommunicator.all_gatherv = _all_gatherv
    CpuCommunicator.reduce_scatterv = _reduce_scatterv


def on_two_ranks(program: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """Call ``program(rank, *args)`` in a forked process for each of two data-parallel ranks; return what they return.

    Called in a process without an engine.
    """
    context, port = multiprocessing.get_context("fork"), get_open_port()
    ranks = [context.Process(target=_rank, args=(program, rank, port, folder, args)) for rank in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(600)
        one.kill()
    assert [one.exitcode for one in ranks] == [0, 0]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def _rank(program: Callable[..., Any], rank: int, port: int, folder: Path, args: tuple[Any, ...]) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ.update(VLLM_DP_RANK=str(rank), VLLM_DP_RANK_LOCAL=str(rank), VLLM_DP_SIZE="2")
    os.environ.update(VLLM_DP_MASTER_IP="127.0.0.1", VLLM_DP_MASTER_PORT=str(port))
    use_exchanges()
    registry._run_in_subprocess = lambda function: function()  # it takes seconds to look at a model class
    (folder / f"rank{rank}.json").write_text(json.dumps(program(rank, *args)))
    os._exit(0)  # vLLM's groups wait for ranks that have ended
