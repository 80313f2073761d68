"""When compiled loops may be used, and how they read tensors.

The modules beside this one do the tree work of a step on a CPU in compiled loops over the tensors' memory.  The modules
``growth``, ``pruning``, ``tree``, ``layout`` and ``step`` state what is computed, in torch operations that suit any
device.  Where ``is_cpu_without_autograd`` holds they call the loops and get the same results; a loop function that
returns None leaves the work to the torch operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

_use_loops = True


@contextmanager
def torch_operations() -> Iterator[None]:
    """Use the torch operations inside, as on other devices."""
    global _use_loops
    before, _use_loops = _use_loops, False
    try:
        yield
    finally:
        _use_loops = before


def is_cpu_without_autograd(*tensors: Tensor) -> bool:
    """Whether the loops may read these tensors: all are in CPU memory, and nothing traces the operations."""
    if not _use_loops or torch.compiler.is_compiling():
        return False
    return all([tensor.is_cpu and not tensor.requires_grad for tensor in tensors])


def as_array(tensor: Tensor, dtype: type) -> np.ndarray:
    """Return the tensor's memory, or a copy where it is not contiguous or has another dtype.

    Each loop is then compiled for one signature only.
    """
    return np.ascontiguousarray(tensor.numpy(), dtype)
