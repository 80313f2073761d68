"""Triton without a GPU: its interpreter, and a stand-in driver, because vLLM checks for an active backend."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def use_interpreter() -> None:
    """Interpret Triton kernels in this process, on CPU tensors.  Call this before anything imports triton.

    Raises:
        RuntimeError: triton.language is imported already.
    """
    if "triton.language" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton is imported already: set TRITON_INTERPRET=1 or call this first")
    os.environ["TRITON_INTERPRET"] = "1"
    claim_backend()
    _save_time()


def claim_backend() -> None:
    """Let vLLM use Triton; it asks once, when it is imported."""
    from triton.backends import Backend, backends

    class Driver:
        @classmethod
        def is_active(cls) -> bool:
            return True

    backends["cpu"] = Backend(None, Driver)


def _save_time() -> None:
    """Leave out what takes most of the interpreter's time and changes no result."""
    from triton.runtime import interpreter

    _patch_once(interpreter)
    _know_types(interpreter)
    # It looks for overflows without reporting any: they are asserted in its debug mode only.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _patch_once(interpreter: ModuleType) -> None:
    """Triton's language is replaced anew at each launch and each call of a function on the device; here once."""
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

    def patch(owner, name, member, _builder, scope):
        function, semantic = _within(member), interpreter.interpreter_semantic

        def call(*args, **kwargs):
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(owner, name, call)

    interpreter._patch_lang, interpreter._patch_attr = patch_once, patch


def _within(member: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the language without the wrapper that asks whether it has its ``_semantic``."""
    is_wrapper = member.__code__.co_qualname == "builtin.<locals>.wrapper"
    return member.__wrapped__ if is_wrapper else member


def _know_types(interpreter: ModuleType) -> None:
    """Each result makes its type and shape anew, from lists of constants; here equal ones are made once."""
    from triton.language import core, semantic

    find_dtype, dtypes = interpreter._get_np_dtype, {}

    def find_dtype_once(triton_dtype):
        name = triton_dtype.name
        if name not in dtypes:
            dtypes[name] = find_dtype(triton_dtype)
        return dtypes[name]

    interpreter._get_np_dtype = find_dtype_once
    make_block, blocks, shapes = core.block_type.__init__, {}, {}

    def init_block(self, element_ty, shape):
        sizes = shape.values if type(shape) is core.tuple else shape
        sizes = tuple([size.value if type(size) is core.constexpr else size for size in sizes])
        key = element_ty.name, sizes
        if key not in blocks:
            make_block(self, element_ty, shape)
            self.shape = shapes.setdefault(sizes, self.shape)
            blocks[key] = self.__dict__
        else:
            self.__dict__ = {**blocks[key], "element_ty": element_ty}

    core.block_type.__init__ = init_block
    facts_of = {}

    def init_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in facts_of:
            numel = core.constexpr(math.prod(sizes))
            facts_of[sizes] = numel, core.tuple([core.constexpr(size) for size in sizes])
        self.numel, self.shape = facts_of[sizes]

    core.tensor.__init__ = init_tensor
    broadcast = semantic.TritonSemantic.broadcast_impl_value

    def broadcast_others(self, lhs, rhs):
        same = lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape
        return (lhs, rhs) if same else broadcast(self, lhs, rhs)

    semantic.TritonSemantic.broadcast_impl_value = broadcast_others


def shuffle_programs() -> None:
    """Run the programs of each launch in a random order: on a GPU none can rely on an earlier one."""
    from triton.runtime.interpreter import InterpreterBuilder

    chance, set_dim, set_idx = random.Random(0), InterpreterBuilder.set_grid_dim, InterpreterBuilder.set_grid_idx

    def set_grid_dim(builder, *grid):
        set_dim(builder, *grid)
        count = math.prod(grid)
        builder.order = iter(chance.sample(range(count), count))

    def set_grid_idx(builder, *_):
        _, second, third = builder.grid_dim
        others, z = divmod(next(builder.order), third)
        set_idx(builder, *divmod(others, second), z)

    InterpreterBuilder.set_grid_dim, InterpreterBuilder.set_grid_idx = set_grid_dim, set_grid_idx
