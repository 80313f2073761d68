"""Patches of vLLM as data: all are checked before any is applied; applying is idempotent and can be undone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

_MARK = "__specplug_original__"


@dataclass(frozen=True)
class Patch:
    """One wrapped vLLM function.

    Attributes:
        target: its module, or module and class: ``module:Class``.
        attribute: the function's name.
        parameters: all its parameters, in order.
        reason: why neither registering nor subclassing is enough.
        wrap: makes the replacement from the original.
    """

    target: str
    attribute: str
    parameters: tuple[str, ...]
    reason: str
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]

    def owner(self) -> Any:
        module, _, name = self.target.partition(":")
        found = import_module(module)
        return getattr(found, name) if name else found

    def problem(self) -> str | None:
        """Return why this patch cannot be applied to the installed vLLM, or None."""
        try:
            function = getattr(self.owner(), self.attribute)
        except (ImportError, AttributeError) as error:
            return f"{self.target}.{self.attribute} is missing ({error})"
        found = tuple(inspect.signature(getattr(function, _MARK, function)).parameters)
        if found != self.parameters:
            return f"{self.target}.{self.attribute} takes {found}, expected {self.parameters}"
        return None


def apply_all(patches: Sequence[Patch]) -> list[str]:
    """Apply all patches, or none of them; return the problems that prevented it."""
    problems = [problem for patch in patches if (problem := patch.problem())]
    if problems:
        return problems
    for patch in patches:
        original = getattr(patch.owner(), patch.attribute)
        if hasattr(original, _MARK):
            continue  # applied by an earlier call in this process
        wrapper = patch.wrap(original)
        setattr(wrapper, _MARK, original)
        setattr(patch.owner(), patch.attribute, wrapper)
    return []


def undo_all(patches: Sequence[Patch]) -> None:
    """Restore vLLM's functions."""
    for patch in patches:
        function = getattr(patch.owner(), patch.attribute)
        if hasattr(function, _MARK):
            setattr(patch.owner(), patch.attribute, getattr(function, _MARK))
