"""Linear layers over few rows on a CPU, in a C++ operator that reads each weight once for all rows."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_specplug.kernels.cpu_ops import operators

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make_row_linear(handle: torch.Tensor | None, max_rows: int) -> Callable[..., torch.Tensor] | None:
    """Return ``linear(x, weight, bias)``, as ``torch.nn.functional.linear``; None if the operator cannot be built.

    Args:
        handle: int64 ``[]``; address of vLLM's packed copy of the weight (``_custom_ops.create_onednn_mm``), which
            computes more than ``max_rows`` rows.  None: torch does, from the weight itself.
        max_rows: most rows that the operator computes.

    The sums are float32, in another order than vLLM's.  Weights: one of ``DTYPES``, contiguous.
    """
    if (ops := operators()) is None:
        return None
    linear = ops.row_linear.default
    return lambda x, weight, bias: linear(x, weight, bias, handle, max_rows)
