"""Asks the installed vLLM for ``specplug doctor``: its platform, its model runner, and the symbols that we need.

``import vllm`` loads the compiler of PyTorch and takes seconds.  So symbols are read from vLLM's source files, and only
the modules with which vLLM chooses a platform are imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import ModuleType

from vllm_specplug.vllm import check
from vllm_specplug.vllm.sources import installed_sources


@dataclass(frozen=True)
class Installation:
    """Answers of vLLM on this machine.

    Attributes:
        platform: class name of vLLM's platform.
        kind: ``cpu``, ``cuda`` or ``other``.
        runner: model runner of an ordinary model, ``V1`` or ``V2``.
        why: why vLLM chooses this runner.
    """

    platform: str
    kind: str
    runner: str
    why: str


@contextmanager
def vllm_without_init() -> Iterator[None]:
    """Make modules of vLLM importable without ``vllm/__init__.py``; these modules are forgotten at the end.

    vLLM imports its platform before the rest of itself, so these modules need no other part.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
    """
    if "vllm" in sys.modules:
        yield
        return
    if (spec := find_spec("vllm")) is None:
        raise ModuleNotFoundError("vLLM is not installed")
    before = set(sys.modules)
    package = ModuleType("vllm")
    package.__path__ = list(spec.submodule_search_locations or ())
    sys.modules["vllm"] = package
    try:
        yield
    finally:
        for name in set(sys.modules) - before:
            if name.split(".")[0] == "vllm":
                del sys.modules[name]


def find_platform() -> tuple[str, str]:
    """Return the name of vLLM's platform, and its kind: ``cpu``, ``cuda`` or ``other``."""
    from vllm.platforms import current_platform

    kind = "cpu" if current_platform.is_cpu() else "cuda" if current_platform.is_cuda() else "other"
    return type(current_platform).__name__, kind


def find_runner() -> tuple[str, str]:
    """Return the model runner of an ordinary model, ``V1`` or ``V2``, and the reason."""
    from vllm import envs
    from vllm.triton_utils import HAS_TRITON

    forced = envs.VLLM_USE_V2_MODEL_RUNNER
    if forced is not None:
        return ("V2" if forced else "V1"), f"VLLM_USE_V2_MODEL_RUNNER={int(forced)}"
    return ("V2", "Triton is present") if HAS_TRITON else ("V1", "no Triton backend for this platform")


@cache
def examine() -> Installation:
    """Return vLLM's answers on this machine."""
    with vllm_without_init():
        return Installation(*find_platform(), *find_runner())


def find_problems(installed: Installation) -> list[str]:
    """Return why the plugin cannot be active: vLLM is too old, or symbols are missing or differ in its source files."""
    return check.check_runner(installed.runner, installed_sources().problem).problems
