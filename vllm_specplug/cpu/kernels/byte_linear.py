"""Linear layers with weights and inputs rounded to 8 bits, on CPUs that multiply such numbers (AVX-512 VNNI, or AVX2
without AVX-512).

They are for drafts: a draft decides how many tokens a step emits and never which ones, so that it need not be exact.
"""

from __future__ import annotations

import torch

from vllm_specplug.cpu.kernels.cpu_ops import operators
from vllm_specplug.cpu.kernels.huge_pages import empty_in_huge_pages


class ByteLinear:
    """Computes ``x @ weight.T + bias`` with both factors rounded to 255 steps; the sums of the products are exact.

    64 inputs are rotated together before they are rounded, in weights and in ``x``: that changes no product, and large
    numbers are spread over the 64.  The steps are those of an output's weights, and of a row of ``x``.

    Args:
        weight: float32, bfloat16 or float16 ``[outputs, inputs]``; not kept.
        parts: inputs come in so many parts of one size, whose scales differ; each has steps of its own.

    Attributes:
        packed: uint8 ``[blocks, parts, inputs of a part, 32]``; without AVX-512 blocks have 16 outputs.
        scales: float32 ``[blocks, parts, 32]``; what a weight's step is.
        num_outputs: of the layer.
    """

    def __init__(self, weight: torch.Tensor, parts: int = 1):
        assert (ops := operators()) is not None
        weight = weight.detach().contiguous()
        self.num_outputs = len(weight)
        shape, scales_shape = ops.byte_linear_shapes.default(*weight.shape, parts)
        self.packed = empty_in_huge_pages(torch.Size(shape), torch.uint8)
        self.scales = torch.empty(scales_shape, dtype=torch.float32)
        self._linear = ops.byte_linear.default
        ops.byte_linear_pack.default(weight, self.packed, self.scales)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``[num_rows, inputs]`` -> ``[num_rows, outputs]``, in the type of ``x``."""
        return self._linear(x, self.packed, self.scales, bias, self.num_outputs)


def can_multiply_bytes() -> bool:
    """Whether this CPU has the instructions, and the operator could be built."""
    return (ops := operators()) is not None and bool(ops.byte_linear_shapes.default(1, 64, 1))
