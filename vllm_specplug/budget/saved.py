"""Saved costs: one JSON file for each model, method and machine in the user's cache."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from vllm_specplug.budget.cost import RoundCost, StepCost
from vllm_specplug.utils.files import kept_path, kept_paths, write_json

logger = logging.getLogger("vllm_specplug")

Costs = TypeVar("Costs", StepCost, RoundCost)
#: Folders in the user's cache, of both kinds of costs.
FOLDER, ROUNDS = "costs", "step_times"
#: Raised for a file that cannot be read, or holds something else.
WRONG = (OSError, ValueError, KeyError, TypeError, AttributeError)


def load(kind: type[Costs], facts: Mapping[str, Any], most: int) -> Costs | None:
    """Return the costs saved for these facts; None: there are none that can be used.

    Args:
        kind: ``StepCost`` or ``RoundCost``.
        facts: model, machine and settings on which the costs depend.
        most: largest number of rows or requests.
    """
    path = kept_path(_folder(kind), facts)
    try:
        return _read(kind, path, most)[1]
    except FileNotFoundError:
        return None
    except WRONG as error:
        logger.warning("vllm-specplug: the cost model %s cannot be used, costs are measured again: %s", path, error)
        return None


def save(facts: Mapping[str, Any], costs: StepCost | RoundCost) -> Path | None:
    """Write costs; return None if that fails, which the server survives."""
    path = kept_path(_folder(type(costs)), facts)
    try:
        write_json(path, {"facts": dict(facts), "measured": costs.measured, "weights": costs.weights})
    except OSError as error:
        logger.warning("vllm-specplug: the cost model is not saved: %s", error)
        return None
    return path


def saved_costs() -> list[tuple[dict[str, Any], StepCost]]:
    """Return facts and costs of all usable files of ``StepCost`` on this machine, newest first."""
    found = []
    for path in kept_paths(FOLDER):
        try:
            found.append(_read(StepCost, path, 64))
        except WRONG:
            continue
    return found


def _read(kind: type[Costs], path: Path, most: int) -> tuple[dict[str, Any], Costs]:
    """Return facts and costs of a file.  Keys of JSON are texts: rows, requests and nodes are read as numbers."""
    saved = json.loads(path.read_text())
    measured: Any = {
        int(name) if name.isdigit() else name: {int(count): seconds for count, seconds in points.items()}
        for name, points in saved["measured"].items()
    }
    return saved["facts"], kind(measured, most, saved.get("weights"))


def _folder(kind: type) -> str:
    return ROUNDS if kind is RoundCost else FOLDER
