"""Saved cost models of V1 and step times of V2: one JSON file for each model, method and machine."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from vllm_specplug.budget.costs import PARTS, CostModel
from vllm_specplug.budget.step_times import StepTimes
from vllm_specplug.utils.files import replacing

logger = logging.getLogger("vllm_specplug")

Saved = TypeVar("Saved")
#: Folders of V1's cost models and of V2's step times.
COSTS, STEP_TIMES = "costs", "step_times"


def folder() -> Path:
    """Return the folder of V1's files, below ``$XDG_CACHE_HOME`` if that is set."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vllm-specplug" / COSTS


def path_of(facts: Mapping[str, Any], kind: str = COSTS) -> Path:
    """Return the file for these facts about a model and a machine; ``kind`` is ``COSTS`` or ``STEP_TIMES``."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return (folder() if kind == COSTS else folder().with_name(kind)) / f"{digest[:16]}.json"


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
    return _load(path_of(facts), _read)


def load_step_times(facts: Mapping[str, Any], max_num_reqs: int) -> StepTimes | None:
    """Return the saved step times of the V2 runner; None if there is no file, or none that can be used."""

    def read(path: Path) -> StepTimes:
        return StepTimes(StepTimes.measured_in(json.loads(path.read_text())["seconds"]), max_num_reqs)

    return _load(path_of(facts, STEP_TIMES), read)


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
    path = path_of(facts, STEP_TIMES if isinstance(model, StepTimes) else COSTS)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps({"facts": dict(facts), "seconds": model.to_json(), **more}, default=str))
    except OSError as error:
        logger.warning("vllm-specplug: the cost model is not saved: %s", error)
        return None
    return path


def saved_models() -> list[dict[str, Any]]:
    """Return all usable cost models saved on this machine, newest first."""
    found = []
    for path in sorted(folder().glob("*.json"), key=lambda path: -path.stat().st_mtime):
        try:
            found.append(_read(path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return found
