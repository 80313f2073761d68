"""Triton without a GPU: its interpreter, and a driver that satisfies the host's question for a backend."""

from __future__ import annotations

import os
import sys


def use_interpreter() -> None:
    """Run Triton kernels in this process by interpreter, on CPU tensors.  Call before anything imports triton.

    Raises:
        RuntimeError: too late, kernels are imported already.
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
