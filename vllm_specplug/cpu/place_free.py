"""Sigmoid and SiLU whose bits do not depend on a number's place in its tensor.

torch computes the last numbers of a tensor, and of each thread's part, by other functions than the rest.  So a router's
sigmoid gives a row other bits in another batch.  ``torch.exp`` is one function for all.  (Compiled models have one
function too.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return (1 / (1 + (-x.float()).exp())).to(x.dtype)


def silu(x: torch.Tensor) -> torch.Tensor:
    return (x.float() / (1 + (-x.float()).exp())).to(x.dtype)


_REPLACED = {
    torch.sigmoid: sigmoid,
    torch.Tensor.sigmoid: sigmoid,
    functional.sigmoid: sigmoid,
    torch._C._nn.silu: silu,
    functional.silu: silu,
}


class PlaceFree(TorchFunctionMode):
    """Computes sigmoids and SiLUs so inside the context, if nothing is written in place."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replaced = _REPLACED.get(function)
        if replaced is None or len(args) != 1 or any((kwargs or {}).values()):
            return function(*args, **(kwargs or {}))
        return replaced(*args)
