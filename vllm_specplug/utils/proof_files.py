"""Kept results of the proof at start: one JSON file for each model, vLLM, plugin and device."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_specplug.utils.files import kept_path, kept_paths, write_json

logger = logging.getLogger("vllm_specplug")
#: The folder in the user's cache.
FOLDER = "proofs"


def load(facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the kept result of a proof that has passed; None if there is none."""
    found = _read(kept_path(FOLDER, facts))
    return found if found is not None and not found["fault"] else None


def save(facts: Mapping[str, Any], fault: str, **numbers: float) -> None:
    """Write a result; ``fault`` is empty if the proof has passed.  The server survives a folder that is read-only."""
    result = {"facts": dict(facts), "fault": fault, "date": time.strftime("%Y-%m-%d %H:%M"), **numbers}
    try:
        write_json(kept_path(FOLDER, facts), result)
    except OSError as error:
        logger.warning("vllm-specplug: the result of the proof is not kept: %s", error)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
        return found if {"facts", "fault", "date"} <= set(found) else None
    except (OSError, ValueError, TypeError):
        return None


def kept() -> list[dict[str, Any]]:
    """Return all results on this machine, newest first."""
    return [result for path in kept_paths(FOLDER) if (result := _read(path)) is not None]
