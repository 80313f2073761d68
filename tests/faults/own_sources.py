"""A pytest plugin: the test run must have imported the package from the folder that it runs in."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

PACKAGE = "vllm_specplug"


def strangers(folder: Path) -> list[str]:
    """Return the files of loaded modules of the package that lie outside ``folder``."""
    modules = [module for name, module in sys.modules.copy().items() if name.partition(".")[0] == PACKAGE]
    files = [Path(module.__file__) for module in modules if getattr(module, "__file__", None)]
    return [str(file) for file in files if not file.is_relative_to(folder)]


def pytest_sessionfinish() -> None:
    """End with pytest's exit status 4 if a module came from elsewhere."""
    if found := strangers(Path.cwd()):
        pytest.exit(f"not imported from {Path.cwd()}: {', '.join(found)}", returncode=4)
