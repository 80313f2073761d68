"""The processes that train one head together, through torch.distributed; a single process does without it.

Each process works on its share of a step's micro-batches, and the gradients are summed once per step. So two processes
make the same step as one process with twice the `accumulate`. A draft head is small: one all-reduce of all gradients
costs less than the hooks of a DistributedDataParallel wrapper, and the head stays a plain module.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")

#: How long the other processes wait while the leader makes answers and features, or measures.
TIMEOUT = timedelta(hours=24)


@dataclass(frozen=True)
class Team:
    """This process's rank among `size` processes, and its device."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_leader(self) -> bool:
        """Whether this process writes the files and shows progress."""
        return self.rank == 0

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def leader_first(self, work: Callable[[], Result]) -> Result:
        """Call `work` in the leader, then in the other processes, which find the files that the leader made."""
        result = work() if self.is_leader else None
        self.barrier()
        return result if self.is_leader else work()

    def share_weights(self, head: torch.nn.Module) -> None:
        """Give every process the leader's parameters and buffers."""
        if self.size > 1:
            for tensor in (*head.parameters(), *head.buffers()):
                dist.broadcast(tensor.data, 0)

    def add_gradients(self, head: torch.nn.Module) -> None:
        """Replace each gradient by its sum over the processes; a missing one (no micro-batch here) counts as zero."""
        if self.size == 1:
            return
        parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
        dist.all_reduce(flat)
        parts = flat.split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad.copy_(part.view_as(parameter))


@contextmanager
def join(device: str = "auto") -> Iterator[Team]:
    """Join the team that torchrun describes in the environment; without torchrun it is a team of one.

    device: "cpu", "cuda", "cuda:N", or "auto": CUDA if there is a device. Several processes take one CUDA device each.

    Raises:
        ValueError: the device is unknown, not supported or not there.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    chosen = _device(device, int(os.environ.get("LOCAL_RANK", 0)))
    if size == 1:
        yield Team(device=chosen)
        return
    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        yield Team(rank, size, chosen)
    finally:
        dist.destroy_process_group()


def _device(name: str, local_rank: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(f"cuda:{local_rank}" if name == "cuda" else name)
    except RuntimeError as error:
        raise ValueError(f"device {name!r} is unknown: give cpu, cuda, cuda:N or auto") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is not supported for training: give cpu, cuda, cuda:N or auto")
    if device.type == "cuda":
        if device.index >= torch.cuda.device_count():
            raise ValueError(f"there is no device {device}: {torch.cuda.device_count()} CUDA device(s) found")
        torch.cuda.set_device(device)
    return device
