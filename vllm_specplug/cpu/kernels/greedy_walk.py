"""Greedy decoding on a CPU directly from the logits: the ``argmax`` of each row, and the walk of trees by it.

These are C++ ops.  Their reference is ``walk.walk_exact`` with ``argmax`` as the sampler, which runs where the ops
cannot be built.
"""

from __future__ import annotations

import torch

from vllm_specplug.cpu.kernels.cpu_ops import operators
from vllm_specplug.types import TokenTree, Walk

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def is_available(logits: torch.Tensor) -> bool:
    """Return whether the ops can be used on these logits."""
    return logits.device.type == "cpu" and logits.dtype in _DTYPES and operators() is not None


def greedy_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Return the index of the first largest logit of each row, int32 ``[num_rows, 1]``.

    Args:
        logits: float32, bfloat16 or float16 ``[num_rows, vocab_size]``.
    """
    return operators().greedy_tokens.default(logits)


def greedy_walk(
    tree: TokenTree, logits: torch.Tensor, first_rows: torch.Tensor, active: torch.Tensor, max_emitted: int
) -> Walk:
    """Walk all trees at temperature 0.

    Args:
        tree: the verified trees.
        logits: float32, bfloat16 or float16 ``[num_logits_rows, vocab_size]``.
        first_rows: int64 ``[num_reqs]``; row of each request's root in ``logits``.
        active: bool ``[num_reqs]``; requests to walk; the others emit nothing.
        max_emitted: most tokens to emit.

    Returns:
        The walk, as wide as its longest path.
    """
    walk = operators().greedy_walk.default
    return Walk(*walk(logits, tree.token_ids.contiguous(), tree.parents.contiguous(), first_rows, active, max_emitted))
