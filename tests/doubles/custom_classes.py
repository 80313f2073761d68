"""Worker and scheduler classes of a user, who has derived them from vLLM's."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.cpu_worker import CPUWorker


class CountingScheduler(Scheduler):
    """Counts its steps."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.steps = 0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        return super().schedule(*args, **kwargs)


class UsersAsyncScheduler(AsyncScheduler):
    pass


class CountingWorker(CPUWorker):
    """Counts its steps."""

    steps = 0

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        return super().execute_model(*args, **kwargs)
