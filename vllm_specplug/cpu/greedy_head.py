"""The target's logits in greedy steps on a CPU: only those that may be the largest of their row."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_world_size

from vllm_specplug.config import ConfigError
from vllm_specplug.cpu.kernels.cpu_ops import operators
from vllm_specplug.cpu.kernels.huge_pages import empty_in_huge_pages
from vllm_specplug.cpu.kernels.row_linear import uses_tiles
from vllm_specplug.vllm.drafters.target_parts import find_head

logger = logging.getLogger("vllm_specplug")

#: Most rows of a call.  With more, so many blocks may hold the largest logit of a row that all are computed as fast
#: (one core of an EPYC with VNNI, SmolLM2: alike at 96 rows; without AVX-512, 64 rows still take less time).
MOST_ROWS = 64
#: Weights from this size on, which no model has, could make bounds overflow.
LARGEST_WEIGHT = 1e6
#: Most bytes of the head's copy in 8 bits.  Chosen by hand, to bound the memory.
MOST_BYTES = 1 << 30


class GreedyHead:
    """Takes the place of ``model.compute_logits``, from which it differs in the next call after ``expect`` only.

    Args:
        model: the target, its weights packed.
        head: of ``make_greedy_head``.
        num_tokens: logits of a row, those of padding left out.
    """

    def __init__(self, model: Any, head: Callable[[torch.Tensor], torch.Tensor], num_tokens: int):
        self._compute, self._head, self._num_tokens = model.compute_logits, head, num_tokens
        self._is_greedy = False
        model.compute_logits = self.compute_logits

    @classmethod
    def make(cls, model: Any, hidden_size: int, dtype: torch.dtype) -> GreedyHead | None:
        """Return the head of a target; None where the CPU or the target's head does not allow it.

        The plugin must compute the head (``linear_rows``), and its product must be all that the logits are.
        """
        try:
            processor, layer = find_head(model, hidden_size, dtype)
        except ConfigError:
            return None
        operands = getattr(getattr(layer, "cpu_linear", None), "operands", None)
        weight = getattr(layer, "weight", None)
        if operands is None or weight is None or weight.numel() > MOST_BYTES:
            return None
        if get_tensor_model_parallel_world_size() > 1:
            return None
        num_tokens = min(processor.org_vocab_size, len(weight))
        hidden = torch.randn(MOST_ROWS, hidden_size, generator=torch.Generator().manual_seed(0)).to(dtype)
        product = layer.cpu_linear(hidden, weight, None)[:, :num_tokens]
        if not torch.equal(product, model.compute_logits(hidden)):  # for example scaled, capped, or with a bias
            return None
        head = make_greedy_head(weight.data, num_tokens, operands)
        if head is None:
            return None
        logger.info("LM head: greedy steps compute only logits that may be the largest")
        return cls(model, head, num_tokens)

    def expect(self, is_greedy: bool) -> None:
        """Say whether all that is read of the next logits is their ``argmax``."""
        self._is_greedy = is_greedy

    def compute_logits(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """Do what the target's method does."""
        is_greedy, self._is_greedy = self._is_greedy, False
        if is_greedy and 0 < len(hidden) <= MOST_ROWS:
            return self._head(hidden)[:, : self._num_tokens]
        return self._compute(hidden, *args, **kwargs)


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
