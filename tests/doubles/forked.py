"""Programs whose engine has processes of its own, all of them forked from one that has imported what they need.

In a new process vLLM's imports take ten seconds and more: three times for an engine with one rank.  Without forks, as
users start them, are the servers of the tests.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.cpp_extension import get_default_build_root

CORES = sorted(os.sched_getaffinity(0))
needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="two ranks need two cores")


def answer_in_new_process(program: Callable[..., Any], first: str, folder: Path, *args: Any) -> Any:
    """Call ``program`` in a new process, and return what it returns, as JSON has it.

    Args:
        program: a function of a module, which is imported into the process that all others are forked from.
        first: a module to be imported there before.
        folder: a folder for files and logs; also the cache of the user who runs the program.
        args: what the program is called with.
    """
    # Costs are measured anew; kernels are not compiled again.
    kernels = Path(get_default_build_root())
    kernels.mkdir(parents=True, exist_ok=True)
    (folder / "torch_extensions").symlink_to(kernels)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([first, program.__module__])
    settings = {
        **os.environ,
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions for the ranks
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    process = context.Process(target=_answer, args=(settings, program, folder, args))
    process.start()
    process.join(1500)
    process.kill()
    assert process.exitcode == 0, (folder / "log").read_text()[-3000:]
    return json.loads((folder / "answer.json").read_text())


def _answer(settings: dict[str, str], program: Callable[..., Any], folder: Path, args: tuple[Any, ...]) -> None:
    from vllm import envs
    from vllm.utils import system_utils
    from vllm.v1.executor.multiproc_executor import WorkerProc

    os.environ.clear()
    os.environ.update(settings)
    # vLLM does not inspect the models again.
    os.environ.update(VLLM_CACHE_ROOT=envs.VLLM_CACHE_ROOT, XDG_CACHE_HOME=str(folder))
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    system_utils._maybe_force_spawn = _fork
    WorkerProc.worker_main = _on_a_core(WorkerProc.worker_main)
    found = program(*args)
    (folder / "answer.json").write_text(json.dumps(found))
    # Ranks that wait for work end seconds after they are asked to.
    for rank in multiprocessing.active_children():
        rank.kill()


def _fork() -> None:
    """What vLLM asks for before it starts a process."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


def _on_a_core(worker_main: Callable[..., None]) -> Callable[..., None]:
    """Two ranks have a core each: they spin while they wait for each other."""

    def run(*args, **kwargs):
        if kwargs["vllm_config"].parallel_config.world_size > 1:
            os.sched_setaffinity(0, {CORES[kwargs["rank"] % len(CORES)]})
        worker_main(*args, **kwargs)

    return run
