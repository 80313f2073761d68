"""Kept results of the proof at start: one JSON file for each model, vLLM, plugin and device."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_specplug.utils.files import replacing

logger = logging.getLogger("vllm_specplug")


def folder() -> Path:
    """Return the folder of the files, below ``$XDG_CACHE_HOME`` if that is set."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vllm-specplug" / "proofs"


def path_of(facts: Mapping[str, Any]) -> Path:
    """Return the file for what the proof depends on."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return folder() / f"{digest[:16]}.json"


def load(facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the kept result of a proof that has passed; None if there is none."""
    found = _read(path_of(facts))
    return found if found is not None and not found["fault"] else None


def save(facts: Mapping[str, Any], fault: str, **numbers: float) -> None:
    """Write a result; ``fault`` is empty if the proof has passed.  The server survives a folder that is read-only."""
    path, result = path_of(facts), {"facts": dict(facts), "fault": fault, "date": time.strftime("%Y-%m-%d %H:%M")}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps({**result, **numbers}, default=str))
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
    found = sorted(folder().glob("*.json"), key=lambda path: -path.stat().st_mtime)
    return [result for path in found if (result := _read(path)) is not None]
