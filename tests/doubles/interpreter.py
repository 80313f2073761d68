"""Triton without a GPU: its interpreter, and a stand-in driver, because vLLM checks for an active backend."""

from __future__ import annotations

import os
import sys


def use_interpreter() -> None:
    """Interpret Triton kernels in this process, on CPU tensors.  Call this before anything imports triton.

    Raises:
        RuntimeError: triton.language is imported already.
    """
    if "triton.language" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton is imported already: set TRITON_INTERPRET=1 or call this first")
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import Backend, backends

    class Driver:
        @classmethod
        def is_active(cls) -> bool:
            return True

    backends["cpu"] = Backend(None, Driver)
