"""Engines to be measured in this process: their runner is accessible, their threads are those of a server's worker."""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.platforms import current_platform


def start_in_process(arguments: dict[str, Any]) -> Any:
    """Start an ``LLM`` with these arguments: its scheduler and its worker have no processes of their own."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    llm = LLM(**arguments)
    use_served_threads(llm.llm_engine.vllm_config)
    return llm


def runner_of(llm: Any) -> Any:
    """Return the model runner of an ``LLM`` in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def use_served_threads(vllm_config: Any) -> int:
    """Set the number of compute threads to that of a server's worker with this configuration.

    On a CPU a server of vLLM keeps cores free for its scheduler, but an engine in one process uses all of them.

    Returns:
        The number of threads.
    """
    if current_platform.is_cpu():
        from vllm.utils.ompmultiprocessing import OMPProcessManager

        # It refuses two OpenMP runtimes, and vLLM may have added its own to ours for an engine in one process.
        preloaded = os.environ.pop("LD_PRELOAD", None)
        try:
            of_ranks = OMPProcessManager(vllm_config).cpu_lists  # empty if vLLM is configured not to bind threads
        finally:
            if preloaded is not None:
                os.environ["LD_PRELOAD"] = preloaded
        if of_ranks:
            # vLLM's worker has replaced ``torch.set_num_threads`` by a function that does nothing.
            torch._C.set_num_threads(len(of_ranks[0]))
    return torch.get_num_threads()
