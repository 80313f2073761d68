"""Objects named by string, so that what is not used is not imported."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def load(path: str) -> Any:
    """Import ``module:name`` and return the object."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
