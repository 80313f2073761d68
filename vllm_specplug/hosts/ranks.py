"""Agreement between the tensor-parallel ranks on what a clock decides: each rank's clock says something else.

What follows from tokens and logits alone is the same on all ranks, as in vLLM.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tp_group


def leads() -> bool:
    """Return whether this is the first rank: it decides, counts and traces."""
    return get_tensor_model_parallel_rank() == 0


def agreed(decision: Any) -> Any:
    """Return the first rank's ``decision``; the others pass anything.

    All ranks call this in the same order.  vLLM sends the message through shared memory where it can: the first rank
    does not wait for the others.
    """
    return get_tp_group().broadcast_object(decision, src=0)
