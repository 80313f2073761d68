"""The type in which training computes its products."""

from __future__ import annotations

import torch

from vllm_specplug.utils.environment import lacks_avx512


def compute_dtype(device: torch.device | str) -> torch.dtype:
    """bfloat16, or float32 on a CPU whose products in bfloat16 are slower (docs/training.md, *Time and disk*)."""
    slow = torch.device(device).type == "cpu" and lacks_avx512()
    return torch.float32 if slow else torch.bfloat16


def autocast(device: torch.device) -> torch.autocast:
    """A context in which products of float32 tensors are computed in `compute_dtype(device)`."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=compute_dtype(device) == torch.bfloat16)
