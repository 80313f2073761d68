"""Linear layers on a CPU, in a C++ operator that reads each weight once for many rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch

from vllm_specplug.cpu.kernels.cpu_ops import operators
from vllm_specplug.cpu.kernels.huge_pages import empty_in_huge_pages

#: bfloat16 in 12 bits, without loss (cpu/kernels/bf16_in_12_bits.h); its bytes for an input's 32 weights.
CODED, _CODED_BLOCK = torch.uint8, 48
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make_row_linear(
    weight: torch.Tensor, dtype: torch.dtype | None = None, handle: torch.Tensor | None = None, max_rows: int = 0
) -> Callable[..., torch.Tensor] | None:
    """Return ``linear(x, weight, bias)``, as ``torch.nn.functional.linear``; None if the operator cannot be built.

    Args:
        weight: ``[outputs, inputs]``, contiguous, one of ``DTYPES``.  It is copied: ``linear`` ignores its ``weight``.
        dtype: in which the copy is kept, the attribute ``dtype`` of what is returned.  The weights are rounded to it.
            Another type than the weights' is for float32, and ``CODED``.  None: the smallest that changes no weight;
            that is ``CODED`` if the CPU multiplies pairs of bfloat16 or tiles, and few weights have a rare exponent.
        handle: int64 ``[]``; address of vLLM's packed copy of the weight (``_custom_ops.create_onednn_mm``), which
            computes more than ``max_rows`` rows.  None: the operator does.

    The sums are float32, in another order than vLLM's.  ``x`` has the weight's type.  On a CPU with AMX, products of
    weights kept in bfloat16 use it (``uses_tiles``).

    Raises:
        ValueError: the weight cannot be kept as ``CODED``.
    """
    if (ops := operators()) is None:
        return None
    given = weight.detach()
    kept, outputs, linear = given.to(_stored(dtype) or exact_dtype(given)), weight.shape[0], ops.row_linear.default
    shape, codes = torch.Size(ops.row_linear_shape.default(kept)), None
    if dtype in (None, CODED) and len(found := ops.row_linear_codes.default(kept, weight.dtype)):
        packed, codes = empty_in_huge_pages(torch.Size((*shape[:2], _CODED_BLOCK)), CODED), found
        ops.row_linear_pack_coded.default(kept, packed, codes)
    elif dtype == CODED:
        raise ValueError("these weights need more than 12 bits: too many of them have a rare exponent.")
    else:
        packed = empty_in_huge_pages(shape, kept.dtype)
        ops.row_linear_pack.default(kept, packed, weight.dtype)

    def row_linear(x: torch.Tensor, _: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return linear(x, packed, codes, bias, outputs, handle, max_rows)

    row_linear.dtype = packed.dtype
    row_linear.operands = (packed, codes, outputs) if handle is None else None  # for other operators
    return row_linear


def pack_heads(weights: torch.Tensor) -> list[torch.Tensor]:
    """Pack the weights of ``head_linear``, ``[heads, outputs, inputs]``, one of ``DTYPES``; they are copied."""
    ops = operators()
    assert ops is not None
    kept = weights.detach().to(exact_dtype(weights)).contiguous()
    packed = kept.new_empty(len(kept), *ops.row_linear_shape.default(kept[0]))
    for one, to in zip(kept, packed, strict=True):
        ops.row_linear_pack.default(one, to, weights.dtype)
    return list(packed.unbind(0))


def head_linear(x: torch.Tensor, weights: list[torch.Tensor], outputs: int) -> torch.Tensor:
    """Multiply each head with weights of its own; a row's result does not depend on the other rows.

    Args:
        x: ``[num_rows, heads, inputs]``, of the weights' type.
        weights: of ``pack_heads``.

    Returns:
        ``[num_rows, heads, outputs]``; the strides of the first two are any.
    """
    ops = operators()
    assert ops is not None
    return ops.head_linear.default(x, weights, outputs)


class RowLinearOnUse:
    """Result of ``make_row_linear``, made at its first use: an input embedding has a weight, but often no product.

    Args:
        weight, dtype: of ``make_row_linear``.
    """

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype | None = None):
        self._weight, self._dtype = weight, dtype

    @cached_property
    def linear(self) -> Callable[..., torch.Tensor]:
        linear = make_row_linear(self._weight, self._dtype)
        assert linear is not None, "the operators cannot be built"
        return linear

    @property
    def operands(self) -> tuple[torch.Tensor, torch.Tensor | None, int]:
        return self.linear.operands

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self.linear(x, weight, bias)


def _stored(dtype: torch.dtype | None) -> torch.dtype | None:
    return torch.bfloat16 if dtype == CODED else dtype


def uses_tiles(weight: torch.Tensor) -> bool:
    """Whether AMX computes the products of this bfloat16 weight ``[outputs, inputs]``.

    It does if the CPU has it, Linux allows it, and ``inputs`` is a multiple of 32.
    """
    return (ops := operators()) is not None and ops.row_linear_in_tiles.default(weight, weight.dtype)


def exact_dtype(weight: torch.Tensor) -> torch.dtype:
    """Return the smallest of ``DTYPES`` that holds each weight: checkpoints in 16 bits are often served in float32."""
    if weight.dtype == torch.float32:
        for dtype in (torch.bfloat16, torch.float16):
            if torch.equal(weight.to(dtype).to(torch.float32), weight):
                return dtype
    return weight.dtype
