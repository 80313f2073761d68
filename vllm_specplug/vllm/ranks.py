"""Agreement between the tensor-parallel ranks on decisions by a clock: each rank's clock differs.

What follows from tokens and logits alone is the same on all ranks, as in vLLM.
"""

from __future__ import annotations

from typing import Any

import torch.distributed
from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tp_group,
    model_parallel_is_initialized,
)


def leads() -> bool:
    """Return whether this is the first rank: it decides, counts and traces."""
    return get_tensor_model_parallel_rank() == 0


def several_ranks() -> bool:
    """Return whether others do the same as this rank and must stay in step; without an engine there are none."""
    return model_parallel_is_initialized() and get_tp_group().world_size > 1


def agreed(decision: Any) -> Any:
    """Return the first rank's ``decision``; the others pass anything.

    All ranks call this in the same order.  vLLM sends the message through shared memory where it can: the first rank
    does not wait for the others.
    """
    return get_tp_group().broadcast_object(decision, src=0)


def on_all_ranks(value: Any) -> list[Any]:
    """Return the values of all ranks, which wait for each other; all call this in the same order."""
    group = get_tp_group()
    if group.world_size == 1:
        return [value]
    values: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values
