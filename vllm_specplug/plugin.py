"""Entry point of the plugin: vLLM calls it in every process; it never raises."""

from __future__ import annotations

import logging

from vllm_specplug.utils.lazy import load

logger = logging.getLogger("vllm_specplug")

_logged: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _logged:
        _logged.add(message)
        logger.warning("vllm-specplug: %s", message)


def register() -> None:
    """Register our methods with vLLM.  Idempotent.

    If this vLLM is not supported, nothing is changed and one log line says why.
    vLLM behaves as before until one of our methods is configured.
    """
    try:
        problems = load("vllm_specplug.vllm.install:install")()
    except Exception as error:  # an exception here would stop servers that do not use the plugin
        _warn_once(f"not active: {type(error).__name__}: {error}")
        return
    if problems:
        _warn_once("not active, vLLM is left unchanged: " + "; ".join(problems))
