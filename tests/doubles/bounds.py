"""Triton's interpreter with bounds: a kernel reads and writes only the tensors of its launch.

A pointer keeps the tensor that it was computed from, so a neighbour in the same storage is outside too.  Lanes whose
mask is off may point anywhere.  In ``thorough`` checks addresses that a kernel reads from a tensor are those of any
tensor that lives, and rows that nobody has written are poisoned.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch

#: What moves a pointer, and which of its arguments the pointer is.
MOVES = {
    "create_addptr": 0,
    "create_bitcast": 0,
    "create_broadcast": 0,
    "create_expand_dims": 0,
    "create_reshape": 0,
    "create_splat": 1,
    "create_trans": 0,
    "create_unsplat": 0,
}


class Outside(IndexError):
    """A kernel left the tensors of its launch.

    Attributes:
        found: messages of all of them, since code that drafts may catch exceptions.
    """

    found: ClassVar[list[str]] = []

    def __init__(self, message: str) -> None:
        super().__init__(message)
        Outside.found.append(message)


class Extent:
    """The addresses ``[first, end)`` of a tensor's elements."""

    def __init__(self, tensor: torch.Tensor) -> None:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.first = tensor.data_ptr()
        self.end = self.first + (last + 1) * tensor.element_size() * (tensor.numel() > 0)
        self.name = f"{tensor.dtype} {list(tensor.shape)}"

    def outside(self, addresses: np.ndarray, width: int) -> np.ndarray:
        """Return which elements of ``width`` bytes do not lie in it."""
        return (addresses < self.first) | (addresses + width > self.end)


class Live:
    """The extents of tensors that live; a table of addresses names some of them.

    Attributes:
        is_searched: whether addresses of a table are compared with them.
        known: those that were found before, since a search takes long.
    """

    is_searched: ClassVar[bool] = False
    known: ClassVar[list[tuple[weakref.ref[torch.Tensor], Extent]]] = []

    @classmethod
    def outside(cls, addresses: np.ndarray, width: int) -> np.ndarray:
        """Return which elements lie in no tensor."""
        cls.known[:] = [(tensor, extent) for tensor, extent in cls.known if tensor() is not None]
        outside = _in_none(addresses, width, [extent for _, extent in cls.known])
        if not outside.any():
            return outside
        gc.unfreeze()  # vLLM freezes what lives when an engine has started
        for one in gc.get_objects():
            if issubclass(type(one), torch.Tensor) and one.device.type == "cpu" and one.layout == torch.strided:
                extent = Extent(one)
                if not extent.outside(addresses, width).all():
                    cls.known.append((weakref.ref(one), extent))
        return _in_none(addresses, width, [extent for _, extent in cls.known])


def _in_none(addresses: np.ndarray, width: int, extents: list[Extent]) -> np.ndarray:
    outside = np.ones(addresses.shape, dtype=bool)
    for extent in extents:
        outside &= extent.outside(addresses, width)
    return outside


def check(pointers: Any, mask: Any) -> None:
    """Compare addresses with the bounds of their tensor.

    Raises:
        Outside: an address whose mask is on lies outside.
    """
    addresses = pointers.data if mask is None else pointers.data[mask.data]
    if addresses.size == 0:
        return
    width, extent = max(1, pointers.get_element_ty().primitive_bitwidth // 8), pointers.attr.get("extent")
    if extent is None and not Live.is_searched:
        return
    outside = (extent or Live).outside(addresses, width)
    if outside.any():
        name, first = (extent.name, extent.first) if extent else ("all tensors", 0)
        place = int(addresses[outside][0]) - first
        raise Outside(f"{int(outside.sum())} of {outside.size} addresses outside of {name}: byte {place}")


@contextmanager
def thorough(is_on: bool) -> Iterator[None]:
    """Follow tables of addresses, and fill what ``torch.empty`` returns with NaN or the largest integer.

    Beside an engine, which has millions of objects, a search for tensors takes most of a test's time.
    """
    assert torch.utils.deterministic.fill_uninitialized_memory
    Live.is_searched = is_on
    torch.use_deterministic_algorithms(is_on, warn_only=True)
    try:
        yield
    finally:
        Live.is_searched = False
        torch.use_deterministic_algorithms(False)


def check_addresses() -> None:
    """Check all addresses of all kernels that this process interprets from now on."""
    from triton.runtime import interpreter

    builder, convert = interpreter.InterpreterBuilder, interpreter._implicit_cvt
    for name, place in MOVES.items():
        setattr(builder, name, _keeping_extent(getattr(builder, name), place))
    builder.create_int_to_ptr = builder.create_ptr_to_int = builder.create_bitcast
    for name, mask in (("create_masked_load", 1), ("create_masked_store", 2), ("create_atomic_rmw", 3)):
        setattr(builder, name, _checking(getattr(builder, name), name == "create_atomic_rmw", mask))
    builder.create_atomic_cas = _checking(builder.create_atomic_cas, False, None)

    def convert_with_extent(argument: Any) -> Any:
        converted = convert(argument)
        if torch.is_tensor(argument):
            converted.handle.attr["extent"] = Extent(argument)
        return converted

    interpreter._implicit_cvt = convert_with_extent


def _keeping_extent(function: Callable[..., Any], place: int) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(builder: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(builder, *args, **kwargs)
        if (extent := args[place].attr.get("extent")) is not None:
            result.attr["extent"] = extent
        return result

    return call


def _checking(function: Callable[..., Any], is_rmw: bool, mask: int | None) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(builder: Any, *args: Any, **kwargs: Any) -> Any:
        check(args[1 if is_rmw else 0], None if mask is None else args[mask])
        return function(builder, *args, **kwargs)

    return call
