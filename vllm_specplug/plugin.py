"""Entry point of the plugin: called by vLLM in every process, and never raises."""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm_specplug")

_told: set[str] = set()


def _say_once(message: str) -> None:
    if message not in _told:
        _told.add(message)
        logger.warning("vllm-specplug: %s", message)


def register() -> None:
    """Make our methods known to the host.  Idempotent.

    On a host that is not supported nothing is touched, and one log line says why.
    Nothing of the host's behaviour changes until one of our methods is configured.
    """
    try:
        from vllm_specplug.hosts.compat.install import install

        problems = install()
    except Exception as error:  # an exception here would stop a server that does not even use us
        _say_once(f"not active: {type(error).__name__}: {error}")
        return
    if problems:
        _say_once("not active, the host is left alone: " + "; ".join(problems))
