"""The likeliest tokens of a drafter on a CPU, directly from its logits, in a C++ operator.

Its reference is ``core.draft_sampling.likeliest``, which runs where the operator cannot be built.
"""

from __future__ import annotations

import torch

from vllm_specplug.core import draft_sampling
from vllm_specplug.core.draft_sampling import Children
from vllm_specplug.cpu.kernels.cpu_ops import operators


def _reference(
    logits: torch.Tensor,
    draft_top_k: int,
    draft_ids: torch.Tensor | None = None,
    extra: torch.Tensor | None = None,
) -> Children:
    if extra is not None:
        logits = torch.cat((logits, extra), dim=1)
    return draft_sampling.likeliest(logits, draft_top_k, draft_ids)


def likeliest(
    logits: torch.Tensor,
    draft_top_k: int,
    draft_ids: torch.Tensor | None = None,
    extra: torch.Tensor | None = None,
) -> Children:
    """Choose the likeliest tokens; of equally likely ones the first.

    Args:
        logits: float32, bfloat16 or float16 ``[num_rows, draft_vocab]``.
        draft_top_k: children per row.
        draft_ids: int64 ``[draft_vocab + num_extra]``; target id of each draft id; None if both vocabularies are the
            same.
        extra: like ``logits``, ``[num_rows, num_extra]``; logits of further tokens; None if there are none.

    Returns:
        Their ids and log probabilities; the latter are NaN in a row where ``log_softmax`` gives NaN.
    """
    if (ops := operators()) is None:
        return _reference(logits, draft_top_k, draft_ids, extra)
    return Children(*ops.likeliest.default(logits, draft_top_k, draft_ids, extra))
