"""As many threads as a server's worker has, for engines that are measured in one process."""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.platforms import current_platform


def use_served_threads(vllm_config: Any) -> int:
    """Compute with as many threads as the worker of a server with this configuration, from now on.

    On a CPU the host keeps cores free for its scheduler when it serves, but gives an engine in one process all of them.

    Args:
        vllm_config: the host's.

    Returns:
        The number of threads.
    """
    if current_platform.is_cpu():
        from vllm.utils.ompmultiprocessing import OMPProcessManager

        # It refuses two OpenMP runtimes, and an engine in one process may have added its own to ours.
        preloaded = os.environ.pop("LD_PRELOAD", None)
        try:
            of_ranks = OMPProcessManager(vllm_config).cpu_lists  # empty where the host is told not to bind threads
        finally:
            if preloaded is not None:
                os.environ["LD_PRELOAD"] = preloaded
        if of_ranks:
            # ``torch.set_num_threads`` does nothing any more: the host's worker has replaced it.
            torch._C.set_num_threads(len(of_ranks[0]))
    return torch.get_num_threads()
