"""The folder that a learning drafter is published in: `specplug learn` writes it, servers read it.

HEAD/versions/000003/   a complete checkpoint; a folder never changes once it has this name
HEAD/current.json       {"version", "path", "published", ...measured values}: the version to serve

Each version is written under another name, synced and renamed, and then the pointer is replaced.  So a reader finds
either the version before or the new one, also if the writer is killed.  The newest `KEPT` versions and the current one
are kept.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

POINTER_NAME, VERSIONS_NAME = "current.json", "versions"
KEPT = 3

_PATH = re.compile(rf"{VERSIONS_NAME}/(\d{{6,}})")


@dataclass(frozen=True)
class Published:
    """The current version of a folder.

    Attributes:
        version: counts from 1.
        folder: of the checkpoint.
        published: when, ISO 8601 in UTC.
        facts: the pointer's other entries, such as ``chain_tau`` and ``tree_tau`` on held-out answers.
    """

    version: int
    folder: Path
    published: str
    facts: dict[str, Any]


def is_published(head: str | os.PathLike) -> bool:
    """Return whether the folder has a pointer to a current version."""
    return (Path(head) / POINTER_NAME).is_file()


def read_current(head: str | os.PathLike) -> Published:
    """Read which version is current.

    Raises:
        ValueError: the pointer is damaged, or its version's folder is missing.
        OSError: there is no pointer.
    """
    file = Path(head) / POINTER_NAME
    try:
        found = json.loads(file.read_text())
        version, path, published = (found.pop(key) for key in ("version", "path", "published"))
        named = _PATH.fullmatch(path)
        if named is None or int(named[1]) != version:
            raise ValueError(f"path {path!r} is not that of version {version!r}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} is not a pointer to a published drafter ({type(error).__name__}: {error}): write it again with "
            "`specplug learn`, or give the folder of one version"
        ) from error
    folder = Path(head) / path
    if not folder.is_dir():
        raise ValueError(f"{file} points to {path}, which does not exist: give the folder of another version")
    return Published(version, folder, published, found)


def current_folder(drafter: str | os.PathLike) -> Path:
    """Return the checkpoint to serve: the current version's of a published folder; another folder is returned as it is.

    Raises:
        ValueError: as in ``read_current``.
    """
    return read_current(drafter).folder if is_published(drafter) else Path(drafter)


def publish(head: str | os.PathLike, write: Callable[[Path], None], facts: Mapping[str, Any]) -> Published:
    """Publish a new version: ``write(folder)`` writes the whole checkpoint into an empty folder.

    Args:
        facts: further entries of the pointer.

    Raises:
        OSError: something could not be written; the current version is unchanged.
    """
    head = Path(head)
    versions = head / VERSIONS_NAME
    versions.mkdir(parents=True, exist_ok=True)
    version = max(_numbers(versions), default=0) + 1
    name = f"{version:06d}"
    with _new_folder(versions, name) as temporary:
        write(temporary)
        for file in temporary.rglob("*"):
            _sync(file)
        _sync(temporary)
        os.rename(temporary, versions / name)
    _sync(versions)
    published = datetime.now(timezone.utc).isoformat(timespec="seconds")
    pointer = {"version": version, "path": f"{VERSIONS_NAME}/{name}", "published": published, **facts}
    _replace_pointer(head, pointer)
    for number in sorted(_numbers(versions))[:-KEPT]:
        shutil.rmtree(versions / f"{number:06d}", ignore_errors=True)
    return Published(version, versions / name, published, dict(facts))


@contextmanager
def _new_folder(versions: Path, name: str) -> Iterator[Path]:
    """Give an empty folder beside the versions; it is removed unless it was renamed.  Leftovers are removed first."""
    for leftover in versions.glob(".new-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = versions / f".new-{name}"
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace_pointer(head: Path, pointer: dict[str, Any]) -> None:
    temporary = head / f".{POINTER_NAME}.tmp"
    try:
        with open(temporary, "w") as file:
            file.write(json.dumps(pointer, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, head / POINTER_NAME)
    finally:
        temporary.unlink(missing_ok=True)
    _sync(head)


def _numbers(versions: Path) -> list[int]:
    return [int(folder.name) for folder in versions.iterdir() if folder.name.isdigit()]


def _sync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
