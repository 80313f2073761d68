"""Figures by matplotlib, which is in the extra ``bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of this size in inches; it needs no display.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'vllm-specplug[bench]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: str | Path) -> None:
    """Write a figure; the path's ending is its format (png, svg, pdf)."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
