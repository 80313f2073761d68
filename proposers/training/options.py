"""Fields of training options: a default, one line of help for the command line, and the valid range."""

from __future__ import annotations

import math
from dataclasses import field, fields
from typing import Any


def option(default: Any, help: str, low: float = -math.inf, high: float = math.inf, above: float | None = None) -> Any:
    """Return a dataclass field; valid values are from ``low`` to ``high`` and, if given, above ``above``."""
    return field(default=default, metadata={"help": help, "low": low, "high": high, "above": above})


def flag_of(name: str) -> str:
    """Return the command line's name of a field."""
    return f"--{name.replace('_', '-')}"


def check_ranges(options: Any) -> None:
    """Check all fields that were made by ``option``.

    Raises:
        ValueError: naming the first value that is out of range, by its name on the command line.
    """
    for one in fields(options):
        value, limits = getattr(options, one.name), one.metadata
        if not limits or isinstance(value, bool | str):
            continue
        low, high, above = limits["low"], limits["high"], limits["above"]
        if low <= value <= high and (above is None or value > above):
            continue
        least = f"above {above:g}" if above is not None else f"at least {low:g}"
        most = f" and at most {high:g}" if high < math.inf else ""
        raise ValueError(f"{flag_of(one.name)} must be {least}{most}, not {value}")
