"""The check that code looks at no value of a device's tensors; it works on a CPU."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: Methods that read one value.  In inference mode they reach no operator that a dispatch mode sees.
READS = ("item", "__bool__", "__int__", "__float__", "__index__")


class NoLookAtTheDevice(TorchDispatchMode):
    """Fails on what would make the CPU wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self._patches = ExitStack()

    def __enter__(self) -> NoLookAtTheDevice:
        for name in READS:
            self._patches.enter_context(patch.object(torch.Tensor, name, _refusing(name)))
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self._patches.close()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2"), name
        return func(*args, **(kwargs or {}))


def _refusing(name: str) -> Any:
    def refuse(*_: Any) -> None:
        raise AssertionError(f"Tensor.{name}")

    return refuse
