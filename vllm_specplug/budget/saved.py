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


def load(kind: type[Costs], facts: Mapping[str, Any], most: int) -> Costs | None:
    """Return the costs saved for these facts; None: there are none that can be used.

    Args:
        kind: ``StepCost`` or ``RoundCost``.
        facts: model, machine and settings on which the costs depend.
        most: largest number of rows or requests.
    """
    path = kept_path(_folder(kind), facts)
    try:
        return kind.from_json(json.loads(path.read_text()), most)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("vllm-specplug: the cost model %s cannot be used, costs are measured again: %s", path, error)
        return None


def save(facts: Mapping[str, Any], costs: StepCost | RoundCost) -> Path | None:
    """Write costs; return None if that fails, which the server survives."""
    path = kept_path(_folder(type(costs)), facts)
    try:
        write_json(path, {"facts": dict(facts), **costs.to_json()})
    except OSError as error:
        logger.warning("vllm-specplug: the cost model is not saved: %s", error)
        return None
    return path


def saved_costs() -> list[tuple[dict[str, Any], StepCost]]:
    """Return facts and costs of all usable files of ``StepCost`` on this machine, newest first."""
    found = []
    for path in kept_paths(FOLDER):
        try:
            saved = json.loads(path.read_text())
            found.append((saved["facts"], StepCost.from_json(saved, 64)))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return found


def _folder(kind: type) -> str:
    return ROUNDS if kind is RoundCost else FOLDER
