"""What a request may ask of the plugin itself: ``extra_args`` offline, ``vllm_xargs`` over HTTP.

The host's front end checks its requests here, a process that drafts nothing: what works on trees would bring numba and
LLVM into it, some 80 MiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_specplug.config import ConfigError, TreeOptions, check_typical_limits

#: Keys of ``extra_args`` that replace the server's options of typical acceptance.
TYPICAL_ARGS = ("typical_epsilon", "typical_delta")


def wants_speculation(extra_args: Mapping[str, Any] | None) -> bool:
    """False where the request says ``{"speculation": false}`` (over HTTP, a host may turn it into 0).

    Raises:
        ConfigError: neither true nor false.
    """
    value = (extra_args or {}).get("speculation", True)
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise ConfigError(f"speculation must be true or false, not {value!r}")
    return bool(value)


def stream_of(extra_args: Mapping[str, Any] | None) -> str:
    """The stream of tasks that a request names (``{"swift_stream": "translation"}``); empty where it names none.

    Raises:
        ConfigError: it is no short string.
    """
    name = (extra_args or {}).get("swift_stream", "")
    if not isinstance(name, str) or len(name) > 64:
        raise ConfigError(f"swift_stream must be a string of up to 64 characters, not {name!r}")
    return name


def request_limits(extra_args: Mapping[str, Any] | None, options: TreeOptions) -> tuple[float, float]:
    """Epsilon and delta of a request: its own (``extra_args``), else the server's.

    Raises:
        ConfigError: a value out of range, or a server that verifies exactly.
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
    """Raise ``ConfigError`` unless all that the request asks for can be done."""
    wants_speculation(extra_args)
    stream_of(extra_args)
    request_limits(extra_args, options)
