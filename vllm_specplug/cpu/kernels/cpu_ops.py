"""Building and loading the C++ operators for CPUs."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

logger = logging.getLogger("vllm_specplug")

_SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
_HEADERS = sorted(Path(__file__).parent.glob("*.h"))
_FLAGS = ["-O3", "-march=native", "-fopenmp"]


@functools.cache
def operators() -> Any:
    """Return the C++ operators, built on first use; None if they cannot be built."""
    try:
        ops = _load()
    except Exception as error:  # compiler, linker and file system errors have many types
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        logger.warning(
            "drafting and tree attention are slow: the C++ operators could not be built (%s), torch runs instead",
            reason,
        )
        return None
    logger.info("tree attention: C++ op %s", ops.tree_attention.default)
    return ops


def build_beside() -> None:
    """Start to build the operators in a process of their own, unless that is done: a server imports vLLM meanwhile.

    The worker's ``operators`` then waits for that process.
    """
    if not library_file().is_file():
        code = f"from {__name__} import operators; operators()"
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True, **quiet)


def call(name: str, *args: Any) -> Any:
    """Call an operator with NumPy arrays in place of tensors, in its result too.

    Raises:
        RuntimeError: the operators cannot be built.
    """
    if (ops := operators()) is None:
        raise RuntimeError("lookup and union need the C++ operators, which could not be built")
    found = getattr(ops, name).default(*[torch.from_numpy(arg) if isinstance(arg, np.ndarray) else arg for arg in args])
    return None if found is None else [tensor.numpy() for tensor in found]


def _load() -> Any:
    """Load the operators, built once per (source, torch, CPU)."""
    library = library_file()
    if not library.is_file():
        _build(library)
    torch.ops.load_library(str(library))
    return getattr(torch.ops, library.stem)


def _build(library: Path) -> None:
    from torch.utils import cpp_extension

    folder = library.parent / "build"
    # This lock ends with its process.  If cpp_extension's own lock file exists now, a killed process has left it.
    with open(library.parent / "build.flock", "w") as lock, _scripts_on_path(), _cores_of_parent():
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.is_file():  # another process has built it meanwhile
            return
        folder.mkdir(exist_ok=True)
        (folder / "lock").unlink(missing_ok=True)
        cpp_extension.load(
            library.stem,
            [str(source) for source in _SOURCES],
            extra_cflags=[*_FLAGS, f"-DSPECPLUG_NAMESPACE={library.stem}"],
            extra_ldflags=["-fopenmp"],
            build_directory=str(folder),
            is_python_module=False,
        )
        (folder / library.name).replace(library)  # it is complete
        shutil.rmtree(folder, ignore_errors=True)


def library_file() -> Path:
    """Return where the operators' library is, or will be once it is built.  Its folder is made."""
    from torch.utils import cpp_extension

    name = library_name(torch.__version__)
    return Path(cpp_extension._get_build_directory(name, verbose=False)) / f"{name}.so"


def library_name(torch_version: str) -> str:
    """Return the name of the operators' library, which tells what it is built from and for."""
    sources = [source.read_text() for source in (*_SOURCES, *_HEADERS)]
    identity = [*sources, torch_version, *_FLAGS, _cpu_identity()]
    return "specplug_" + hashlib.sha256("\n".join(identity).encode()).hexdigest()[:12]


def _cpu_identity() -> str:
    """Describe the CPU, on which ``-march=native`` depends: different machines may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


@contextmanager
def _cores_of_parent() -> Iterator[None]:
    """Let the compiler use the parent process's cores: vLLM binds a worker to some of them, sometimes to one."""
    try:
        own, parents = os.sched_getaffinity(0), os.sched_getaffinity(os.getppid())
    except (AttributeError, OSError):  # another system than Linux, or the parent has ended
        yield
        return
    os.sched_setaffinity(0, own | parents)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


class _scripts_on_path:
    """Let cpp_extension find the environment's ninja when the environment is not activated."""

    def __enter__(self) -> None:
        self.path = os.environ.get("PATH", "")
        os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), self.path])

    def __exit__(self, *exc_info: object) -> None:
        os.environ["PATH"] = self.path
