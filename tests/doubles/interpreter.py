"""Triton without a GPU: its interpreter, and a stand-in driver, because vLLM checks for an active backend."""

from __future__ import annotations

import dataclasses
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
    _save_time()


def _save_time() -> None:
    """Leave out what takes more than half of the interpreter's time and changes no result.

    It replaces Triton's language anew at each launch and each call of a function on the device, looks for overflows
    without reporting any (they are asserted in its debug mode only), and makes the table of dtypes at each use.
    """
    from triton.runtime import interpreter

    honest, patched = interpreter._patch_lang, set()

    class Kept:
        def restore(self) -> None:
            pass

    def patch_once(function):
        module = function.__globals__["__name__"]
        if module not in patched:
            honest(function)
            patched.add(module)
        return Kept()

    interpreter._patch_lang = patch_once
    find_dtype, dtypes = interpreter._get_np_dtype, {}

    def find_dtype_once(triton_dtype):
        name = triton_dtype.name
        if name not in dtypes:
            dtypes[name] = find_dtype(triton_dtype)
        return dtypes[name]

    interpreter._get_np_dtype = find_dtype_once
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
