"""The target's logits in greedy steps on a CPU: only those that may be the largest, see ``kernels.greedy_head``."""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_world_size

from vllm_specplug.config import ConfigError
from vllm_specplug.hosts.drafters.target_parts import find_head
from vllm_specplug.kernels.greedy_head import MOST_ROWS, make_greedy_head

logger = logging.getLogger("vllm_specplug")

#: Most bytes of the head's copy in 8 bits.  Chosen by hand, to bound the memory.
MOST_BYTES = 1 << 30


class GreedyHead:
    """Takes the place of ``model.compute_logits`` where the target's logits are the product with its LM head.

    It differs in the next call after ``expect`` only.

    Args:
        model: the target, its weights packed.
        hidden_size, dtype: of its hidden states.
    """

    def __init__(self, model: Any, hidden_size: int, dtype: torch.dtype):
        self._compute, self._is_greedy = model.compute_logits, False
        self._head = _make_head(model, hidden_size, dtype)
        if self._head is not None:
            model.compute_logits = self.compute_logits

    def expect(self, is_greedy: bool) -> None:
        """Say whether all that is read of the next logits is their ``argmax``."""
        self._is_greedy = is_greedy

    def compute_logits(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """Do what the target's method does."""
        is_greedy, self._is_greedy = self._is_greedy, False
        if is_greedy and self._head is not None and 0 < len(hidden) <= MOST_ROWS:
            return self._head(hidden)
        return self._compute(hidden, *args, **kwargs)


def _make_head(model: Any, hidden_size: int, dtype: torch.dtype) -> Any:
    """Return the operator; None where the plugin does not compute the head, or its product is not all."""
    try:
        processor, layer = find_head(model, hidden_size, dtype)
    except ConfigError:
        return None
    operands = getattr(getattr(layer, "cpu_linear", None), "operands", None)
    weight = getattr(layer, "weight", None)
    if operands is None or weight is None or weight.numel() > MOST_BYTES or get_tensor_model_parallel_world_size() > 1:
        return None
    num_tokens = min(processor.org_vocab_size, len(weight))
    hidden = torch.randn(MOST_ROWS, hidden_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    product = layer.cpu_linear(hidden, weight, None)[:, :num_tokens]
    if not torch.equal(product, model.compute_logits(hidden)):  # for example scaled, capped, or with a bias
        return None
    head = make_greedy_head(weight.data, num_tokens, operands)
    logger.info("the LM head in greedy steps: %s", "all logits" if head is None else "8 bits choose logits to compute")
    return None if head is None else lambda hidden: head(hidden)[:, :num_tokens]
