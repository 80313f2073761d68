"""Writing files so that a reader never sees half of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """A temporary path beside ``path`` to write to: it becomes ``path`` at the end, or is removed if writing fails.

    Raises:
        OSError: it could not be written (a full disk, mostly); says what to do.
    """
    temporary = Path(f"{path}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have write errors of their own
        temporary.unlink(missing_ok=True)
        raise OSError(
            f"{path} could not be written, and what was there is untouched: {str(error).splitlines()[0]}. "
            "Free disk space and run the same command again: finished work is kept."
        ) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
