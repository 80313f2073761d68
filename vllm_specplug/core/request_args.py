"""Options of single requests: ``extra_args`` offline, ``vllm_xargs`` over HTTP.

vLLM's front-end process checks its requests here and drafts nothing.  This module therefore imports no tree code, which
would load more than the front end needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_specplug.config import ConfigError, TreeOptions, check_typical_limits, nearest

#: Keys of ``extra_args`` that override the server's options for typical acceptance.
TYPICAL_ARGS = ("typical_epsilon", "typical_delta")

#: All our keys of ``extra_args``.  Other keys belong to other plugins and are left alone, unless they look like a typo.
REQUEST_ARGS = ("speculation", "record", *TYPICAL_ARGS)


def wants_speculation(extra_args: Mapping[str, Any] | None) -> bool:
    """Return false if the request has ``{"speculation": false}``; over HTTP vLLM passes 0 for false.

    Raises:
        ConfigError: the value is neither true nor false.
    """
    return _is_wanted(extra_args, "speculation")


def wants_record(extra_args: Mapping[str, Any] | None) -> bool:
    """Return false if the request has ``{"record": false}``: a server that records answers leaves it out.

    Raises:
        ConfigError: the value is neither true nor false.
    """
    return _is_wanted(extra_args, "record")


def _is_wanted(extra_args: Mapping[str, Any] | None, name: str) -> bool:
    value = (extra_args or {}).get(name, True)
    if not isinstance(value, bool | int) or value not in (0, 1):
        raise ConfigError(f"{name} must be true or false, not {value!r}")
    return bool(value)


def request_limits(extra_args: Mapping[str, Any] | None, options: TreeOptions) -> tuple[float, float]:
    """Return epsilon and delta of a request: its own (``extra_args``), else the server's.

    Raises:
        ConfigError: a value is out of range, or the server verifies exactly.
    """
    given = {key: extra_args[key] for key in TYPICAL_ARGS if key in extra_args} if extra_args else {}
    if given and options.verification != "typical":
        raise ConfigError(
            f"{', '.join(given)}: this server verifies drafts exactly; start it with "
            '"verification": "typical", or leave the argument out'
        )
    values = {"typical_epsilon": options.typical_epsilon, "typical_delta": options.typical_delta} | given
    check_typical_limits(**values)
    return float(values["typical_epsilon"]), float(values["typical_delta"])


def check_request(extra_args: Mapping[str, Any] | None, options: TreeOptions) -> None:
    """Raise ``ConfigError`` unless all options of the request are valid."""
    if "swift_stream" in (extra_args or {}):
        raise ConfigError("swift_stream was removed: all requests share one search of layers; leave it out")
    for name in set(extra_args or ()) - set(REQUEST_ARGS):
        if meant := nearest(name, REQUEST_ARGS):
            raise ConfigError(f"unknown argument {name!r}: did you mean {meant!r}?")
    wants_speculation(extra_args)
    wants_record(extra_args)
    request_limits(extra_args, options)
