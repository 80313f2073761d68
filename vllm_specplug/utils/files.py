"""Atomic file writes (a reader never sees a partly written file), and files kept in the user's cache."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """Give a temporary path beside ``path`` to write to; it replaces ``path`` at the end, or is removed on failure.

    Raises:
        OSError: the file could not be written (usually a full disk); the message says what to do.
    """
    temporary = Path(f"{path}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors raise their own types
        temporary.unlink(missing_ok=True)
        raise OSError(
            f"{path} could not be written, and its earlier content is unchanged: {str(error).splitlines()[0]}. "
            "Free disk space and run the same command again: finished work is kept."
        ) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def cache_folder(name: str | Path) -> Path:
    """Return a folder of ours in the user's cache, ``$XDG_CACHE_HOME`` or ``~/.cache``; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vllm-specplug" / name


def kept_path(name: str | Path, facts: Mapping[str, Any]) -> Path:
    """Return the JSON file in the cache folder ``name`` for what its content depends on."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return cache_folder(name) / f"{digest[:16]}.json"


def kept_paths(name: str | Path) -> list[Path]:
    """Return the JSON files in the cache folder ``name``, the newest first."""
    return sorted(cache_folder(name).glob("*.json"), key=lambda path: -path.stat().st_mtime)


def write_json(path: Path, value: Any) -> None:
    """Write a file in one piece, and its folder if that is missing.

    Raises:
        OSError: it could not be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, default=str))


def read_object(path: Path, keys: set[str], source: str) -> dict[str, Any]:
    """Read the JSON object in a file that the user names.

    Args:
        keys: keys that it must have.
        source: the command that writes such files.

    Raises:
        ValueError: the file cannot be read, or has something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:  # broken, or several values, one a line
        content = None
    if not isinstance(content, dict) or not keys <= content.keys():
        found = "one JSON object" if content is None else "an object with " + ", ".join(sorted(keys))
        raise ValueError(f"{path} is not {found}: give a file that {source} wrote")
    return content
