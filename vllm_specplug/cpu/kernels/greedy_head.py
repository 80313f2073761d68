"""An LM head for greedy decoding on a CPU: it computes only the logits that may be the largest of their row."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_specplug.cpu.kernels.cpu_ops import operators
from vllm_specplug.cpu.kernels.huge_pages import empty_in_huge_pages
from vllm_specplug.cpu.kernels.row_linear import uses_tiles

#: Most rows of a call.  With more, so many blocks may hold the largest logit of a row that all are computed as fast
#: (one core of an EPYC with VNNI, SmolLM2: alike at 96 rows; without AVX-512, 64 rows still take less time).
MOST_ROWS = 64
#: Weights from this size on, which no model has, could make bounds overflow.
LARGEST_WEIGHT = 1e6


def make_greedy_head(
    weight: torch.Tensor, num_tokens: int, operands: tuple[torch.Tensor, torch.Tensor | None, int]
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return ``head(hidden)``: logits whose ``argmax`` is that of all logits; None where the operator cannot do it.

    ``hidden`` is ``[num_rows, hidden_size]`` of at most ``MOST_ROWS`` rows.  Logits are computed in blocks of 32 (16
    without AVX-512), with the sums of ``row_linear``; those of the other blocks, smaller than the largest one,
    are -inf.

    Args:
        weight: ``[outputs, hidden_size]``, contiguous: float32, bfloat16 or float16.  It is kept in 8 bits beside the
            operands.
        num_tokens: its first rows, which are tokens' and not padding.
        operands: of ``make_row_linear`` for this weight, in the attribute ``operands``.
    """
    if (ops := operators()) is None or not weight.abs().amax() < LARGEST_WEIGHT:
        return None
    size = weight.shape[1]
    if uses_tiles(torch.empty(weight.shape, dtype=torch.bfloat16, device="meta")):
        return None  # they add in another order
    if not (shape := ops.greedy_head_shape.default(num_tokens, size)):
        return None
    num_blocks, num_bounds = shape
    packed = empty_in_huge_pages(torch.Size((num_blocks, size, num_bounds // 3)), torch.uint8)
    bounds = torch.empty(num_blocks, num_bounds, dtype=torch.float32)
    ops.greedy_head_pack.default(weight, num_tokens, packed, bounds)
    (kept, codes, outputs), head = operands, ops.greedy_head.default
    return lambda hidden: head(hidden, kept, codes, outputs, packed, bounds)
