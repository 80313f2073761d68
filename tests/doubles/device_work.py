"""What a device would be asked to do: launches are counted, and looks of the CPU at its values are found.

On a CPU the tensors of the V2 runner are in CPU memory too, so that a look costs nothing and breaks nothing.  A look is
therefore known by its operation and by the code that does it: vLLM's own code and the stand-ins for it are left out, as
are the tensors that vLLM keeps in CPU memory on a GPU too.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor
from triton.runtime.jit import JITFunction

from tests.doubles.no_syncs import LOOKS

#: Methods that read a tensor without an operator.
METHODS = ("tolist", "numpy", "cpu", "__array__")
#: Operators without a launch, besides views.
SILENT = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "alias", "_unsafe_view", "set_", "lift_fresh")
#: Code that may look: vLLM's, what runs its parts in the tests, and libraries below.
OTHERS = (
    "/site-packages/",
    "/lib/python",
    "tests/doubles/interpreted",
    "tests/doubles/device_work",
    "cpu/kernels/tree_attention",
    "<string>",
)


class DeviceWork(TorchDispatchMode):
    """Watches all work inside.

    Attributes:
        launches: by name, calls of operators that compute and launches of Triton kernels.
        looks: operation and place of each look at a value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.looks: list[str] = []
        self._kept_on_cpu: dict[int, torch.Tensor] = {}
        self._patches = ExitStack()
        self._only: set[int] | None = None

    def keep_on_cpu(self, tensor: torch.Tensor) -> None:
        """Do not count looks at a tensor that is in CPU memory on a GPU too."""
        self._kept_on_cpu[_address(tensor)] = tensor  # alive, so that no other tensor gets its address

    @contextmanager
    def on_the_cpu(self, device_tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Watch code that works on copies in CPU memory: looks at these tensors only are counted."""
        self._only = {_address(tensor) for tensor in device_tensors}
        try:
            yield
        finally:
            self._only = None

    def __enter__(self) -> DeviceWork:
        for name in METHODS:
            self._patches.enter_context(patch.object(torch.Tensor, name, self._looking(name)))
        owner, name = (GridExecutor, "__call__") if not torch.cuda.is_available() else (JITFunction, "run")
        self._patches.enter_context(patch.object(owner, name, self._launching(getattr(owner, name))))
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        if name in LOOKS or (name in ("index", "index_put_", "index_put") and _has_mask(args[1])):
            self._look(name, args[0])
        elif not func.is_view and name not in SILENT:
            self.launches[name] += 1
        return func(*args, **(kwargs or {}))

    def _looking(self, name: str) -> Callable[..., Any]:
        honest = getattr(torch.Tensor, name)

        def look(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._look(name, tensor)
            return honest(tensor, *args, **kwargs)

        return look

    def _launching(self, honest: Callable[..., Any]) -> Callable[..., Any]:
        def launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            function = getattr(kernel, "fn", kernel)
            self.launches[getattr(function, "__name__", str(function)).strip("_")] += 1
            with _disable_current_modes():  # the interpreter's own copies
                return honest(kernel, *args, **kwargs)

        return launch

    def _look(self, name: str, tensor: torch.Tensor) -> None:
        address = _address(tensor)
        if address in self._kept_on_cpu or (self._only is not None and address not in self._only):
            return
        frame = sys._getframe(2)
        while frame is not None and ("/torch/" in frame.f_code.co_filename or __file__ == frame.f_code.co_filename):
            frame = frame.f_back
        place = frame.f_code.co_filename if frame is not None else ""
        if not any(other in place for other in OTHERS):
            self.looks.append(f"{name} at {place}:{frame.f_lineno}")


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _has_mask(indices: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
