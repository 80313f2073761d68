"""Logits of a few further tokens on a CPU, in a C++ operator.

A matrix product of torch takes 0.2 ms here, most of it for code and weights that are in no cache.
"""

from __future__ import annotations

import torch

from vllm_specplug.cpu.kernels.cpu_ops import operators


def extra_logits_reference(
    hidden: torch.Tensor, rows: torch.Tensor, other_requests: torch.Tensor | None = None
) -> torch.Tensor:
    """Do ``extra_logits`` in torch."""
    extra = hidden @ rows.T
    if other_requests is not None:
        width = len(hidden) // len(other_requests)
        extra = extra.masked_fill_(other_requests.repeat_interleave(width, dim=0), float("-inf"))
    return extra


def extra_logits(hidden: torch.Tensor, rows: torch.Tensor, other_requests: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``hidden @ rows.T``, with -inf for the tokens of other requests.

    Args:
        hidden: float32, bfloat16 or float16 ``[num_rows, hidden_size]``, request-major, with the same number of rows
            for each request.
        rows: like ``hidden``, ``[num_extra, hidden_size]``; rows of the LM head.
        other_requests: bool ``[num_reqs, num_extra]``; tokens that a request does not draft; None: it drafts all.

    Returns:
        Like ``hidden``, ``[num_rows, num_extra]``.
    """
    if (ops := operators()) is None:
        return extra_logits_reference(hidden, rows, other_requests)
    return ops.extra_logits.default(hidden, rows, other_requests)
