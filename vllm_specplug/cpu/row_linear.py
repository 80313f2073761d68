"""Linear layers on a CPU by our operator, see ``kernels.row_linear``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform

from vllm_specplug.config import ALL_ROWS
from vllm_specplug.cpu.kernels.cpu_ops import operators
from vllm_specplug.cpu.kernels.row_linear import DTYPES, RowLinearOnUse, exact_dtype, make_row_linear, uses_tiles

logger = logging.getLogger("vllm_specplug")

#: Shapes for which oneDNN keeps compiled code, as vLLM asks.
_KEPT_SHAPES = 32
#: Most bytes of weights that are kept beside vLLM's packed ones; vLLM computes the layers beyond.  Chosen by hand, to
#: bound the memory.
MOST_KEPT_TWICE = 2 << 30


@contextmanager
def row_linear_layers(max_rows: int | str, is_bounded: bool = True, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Let unquantised linear layers that are loaded inside compute up to ``max_rows`` rows by our operator.

    They get the attributes ``linear_rows`` and ``linear_dtype``.  With ``ALL_ROWS`` the operator's copy of the weights
    takes the place of the one that vLLM packs; an embedding has a copy only if it multiplies, and shares that of an LM
    head with the same weight.  With a number there are both, for more rows vLLM's.

    Args:
        max_rows: 0: vLLM computes all.
        is_bounded: whether ``MOST_KEPT_TWICE`` holds.
        dtype: in which the copy is kept, rounded; None: the smallest that changes no weight.
    """
    if not max_rows:
        yield
        return
    honest, kept_twice, num_ours, num_layers = utils.dispatch_cpu_unquantized_gemm, 0, 0, 0
    of_embeddings: dict[int, RowLinearOnUse] = {}  # by the address of the weight

    def dispatch(layer: Any, remove_weight: bool) -> None:
        nonlocal kept_twice, num_ours, num_layers
        num_layers += 1
        weight = layer.weight
        if operators() is None or _has_kernels_of_its_own(weight, max_rows == ALL_ROWS):
            honest(layer, remove_weight)
            return
        packed, num_bytes, linear = None, 0, None
        if max_rows == ALL_ROWS and not remove_weight:  # an embedding or an LM head
            linear = of_embeddings.setdefault(weight.data_ptr(), RowLinearOnUse(weight, dtype))
            if isinstance(layer, ParallelLMHead):
                linear = linear.linear
        elif max_rows == ALL_ROWS:
            linear = make_row_linear(weight, dtype)
        else:
            num_bytes = weight.numel() * exact_dtype(weight).itemsize
            if not is_bounded or kept_twice + num_bytes <= MOST_KEPT_TWICE:
                packed = _pack(weight)
                linear = make_row_linear(weight, dtype, packed and packed.handler_tensor, int(max_rows))
        if linear is None:
            honest(layer, remove_weight)
            return
        layer.cpu_linear, layer.packed_weight = linear, packed  # the memory lives as long as the latter
        layer.linear_rows, layer.linear_dtype = max_rows, getattr(linear, "dtype", dtype)
        if remove_weight:
            layer.weight = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)
        kept_twice += num_bytes if packed else 0
        num_ours += 1

    utils.dispatch_cpu_unquantized_gemm = dispatch
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = honest
        logger.info("linear_rows=%s: our operator computes %d of %d linear layers", max_rows, num_ours, num_layers)


def _has_kernels_of_its_own(weight: torch.Tensor, all_rows: bool) -> bool:
    """Whether vLLM has kernels for this weight that may be faster than ours: with AMX, or on Zen with zentorch.

    Those with AMX do not keep bits, so for all rows ours are taken.
    """
    if not hasattr(torch.ops._C, "onednn_mm"):
        return True
    if weight.is_meta or weight.ndim != 2 or weight.dtype not in DTYPES or not weight.is_contiguous():
        return True
    is_zen: Any = getattr(current_platform, "is_zen_cpu", lambda: False)
    if weight.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        return not all_rows and not uses_tiles(weight)
    return is_zen() or utils.check_cpu_sgl_kernel(*weight.shape, weight.dtype)


def _pack(weight: torch.Tensor) -> Any:
    """Let oneDNN pack the weight, as vLLM does; None where it cannot, and our operator computes all rows."""
    try:
        return ops.create_onednn_mm(weight.t(), _KEPT_SHAPES)
    except (AttributeError, RuntimeError):
        return None
