"""Atomic file writes: a reader never sees a partly written file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
