"""Import by name: for code that a lower layer calls in a higher one, and for commands that are slow to import."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def load(name: str) -> Any:
    """Import ``"module"``, or take the attribute of ``"module:attribute"``."""
    module, _, attribute = name.partition(":")
    found = import_module(module)
    return getattr(found, attribute) if attribute else found
