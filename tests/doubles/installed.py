"""Distributions as pip would install them, without pip."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import tomllib

from vllm_specplug import proposer


def install(patch: pytest.MonkeyPatch, project: Path, site: Path) -> None:
    """Put a project's modules and its entry points, as its pyproject.toml lists them, on this process's path."""
    table = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    folder = site / f"{table['name'].replace('-', '_')}-{table['version']}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {table['name']}\nVersion: {table['version']}\n")
    groups = table["entry-points"].items()
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in found.items()) for group, found in groups
    ]
    (folder / "entry_points.txt").write_text("".join(lines))
    patch.setattr(sys, "path", [str(site), str(project), *sys.path])
    proposer._registered.cache_clear()
    proposer.find_method.cache_clear()
