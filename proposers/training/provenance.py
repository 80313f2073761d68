"""Provenance of a checkpoint: the facts needed to make it again."""

from __future__ import annotations

import platform
from pathlib import Path

from vllm_specplug.utils.environment import VLLM_DISTRIBUTIONS, command_line, cpu_name, git_commit, version_of

_PACKAGES = ("vllm-specplug", "torch", "transformers", "safetensors", *VLLM_DISTRIBUTIONS)


def provenance(target_dir: str, **facts) -> dict:
    """The `specplug` entry of a checkpoint's config: command, commit, versions, machine, and the given facts."""
    return {
        "target": Path(target_dir).name,
        "command": command_line(),
        "commit": git_commit(),
        "versions": {name: found for name in _PACKAGES if (found := version_of(name))}
        | {"python": platform.python_version()},
        "machine": f"{platform.machine()}, {cpu_name()}",
        **facts,
    }
