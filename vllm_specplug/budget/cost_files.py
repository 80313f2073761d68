"""Saved cost models of V1 and step times of V2: one JSON file for each model, method and machine."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from vllm_specplug.budget.costs import PARTS, CostModel
from vllm_specplug.budget.step_times import StepTimes
from vllm_specplug.utils.files import kept_path, kept_paths, write_json

logger = logging.getLogger("vllm_specplug")

Saved = TypeVar("Saved")
#: Folders in the user's cache: of V1's cost models, of V2's step times.
FOLDER, STEP_TIMES = "costs", "step_times"


def _read(path: Path) -> dict[str, Any]:
    """Read a file.

    Raises:
        OSError, ValueError, KeyError, TypeError, AttributeError: it cannot be read, or holds no cost model of this
            version.
    """
    saved = json.loads(path.read_text())
    seconds = saved["seconds"]
    if unknown := sorted(set(seconds) - set(PARTS)):
        raise ValueError(f"unknown parts of a step: {', '.join(unknown)}")
    CostModel(CostModel.measured_in(seconds), {"rows": 8, "requests": 8}, CostModel.terms_in(seconds))
    return saved


def load(facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what was saved for these facts; None if there is no file, or none that can be used."""
    return _load(kept_path(FOLDER, facts), _read)


def load_step_times(facts: Mapping[str, Any], max_num_reqs: int) -> StepTimes | None:
    """Return the saved step times of the V2 runner; None if there is no file, or none that can be used."""

    def read(path: Path) -> StepTimes:
        return StepTimes(StepTimes.measured_in(json.loads(path.read_text())["seconds"]), max_num_reqs)

    return _load(kept_path(STEP_TIMES, facts), read)


def _load(path: Path, read: Callable[[Path], Saved]) -> Saved | None:
    try:
        return read(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("vllm-specplug: the cost model %s cannot be used, costs are measured again: %s", path, error)
        return None


def save(facts: Mapping[str, Any], model: CostModel | StepTimes, **more: Any) -> Path | None:
    """Write a cost model, and ``more`` beside it; return None if that fails, which the server survives."""
    path = kept_path(STEP_TIMES if isinstance(model, StepTimes) else FOLDER, facts)
    try:
        write_json(path, {"facts": dict(facts), "seconds": model.to_json(), **more})
    except OSError as error:
        logger.warning("vllm-specplug: the cost model is not saved: %s", error)
        return None
    return path


def saved_models() -> list[dict[str, Any]]:
    """Return all usable cost models saved on this machine, newest first."""
    found = []
    for path in kept_paths(FOLDER):
        try:
            found.append(_read(path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return found
