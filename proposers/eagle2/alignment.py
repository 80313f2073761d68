"""Attention of a drafter that trains on its own features: HASS's context alignment, EAGLE-3's training-time test.

Pass n of a head sees, at row t, the drafter's own inputs of the last n-1 passes on the last n-1 diagonals, and the
target's features before them: a causal mask shifted left by n-1, plus diagonals. Two forms compute the same:

    aligned_attention       plain torch with masked scores, on any device; the reference
    FlexAlignedAttention    torch's flex attention over the keys of all passes side by side, where it compiles

Axis names: B sequences, H query heads, G key/value heads, T rows, D head size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache

import torch
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex

logger = logging.getLogger(__name__)

#: (query [B, H, T, D], keys, values: a list of [B, G, T, D], one of each pass so far) -> [B, H, T, D]
AlignedAttention = Callable[[torch.Tensor, list[torch.Tensor], list[torch.Tensor]], torch.Tensor]

ATTENTIONS = ("auto", "plain", "flex")


def aligned_attention(query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """Causal attention of the latest pass over the rows of all passes: [B, H, T, D].

    keys[s], values[s] [B, G, T, D] belong to pass s (0: target features). With n passes the query at t takes row
    t-i from pass n-1-i for i < n-1, and every older row from pass 0. Masked scores are -inf.
    """
    if len(keys) == 1:
        return F.scaled_dot_product_attention(query, keys[0], values[0], is_causal=True, enable_gqa=True)
    groups = query.shape[1] // keys[0].shape[1]
    keys = [key.repeat_interleave(groups, dim=1) for key in keys]
    values = [value.repeat_interleave(groups, dim=1) for value in values]
    own = len(keys) - 1  # rows t, t-1, ..., t-own+1 come from the drafter's own passes
    rows = query.shape[2]
    query = query * query.shape[-1] ** -0.5
    position = torch.arange(rows, device=query.device)
    age = position[:, None] - position
    scores = (query @ keys[0].transpose(-1, -2)).masked_fill(age < own, float("-inf"))
    recent = [
        (query * _shift(keys[own - i], i)).sum(-1, keepdim=True).masked_fill(age[:, :1] < i, float("-inf"))
        for i in range(own)
    ]
    weights = torch.cat([scores, *recent], dim=-1).softmax(-1).to(query.dtype)
    attended = weights[..., :rows] @ values[0]
    for i in range(own):
        attended = attended + weights[..., rows + i : rows + i + 1] * _shift(values[own - i], i)
    return attended


def _shift(x: torch.Tensor, count: int) -> torch.Tensor:
    """Row t of the result is row t - count of x [B, H, T, D]; the first rows are zero."""
    return F.pad(x, (0, 0, count, 0))[:, :, : x.shape[2]] if count else x


class FlexAlignedAttention:
    """`aligned_attention` as one flex attention over [rows of pass 0 | rows of pass 1 | ...].

    compile: False runs torch's uncompiled form, for comparing.
    """

    def __init__(self, compile: bool = True):
        self.attention = torch.compile(flex.flex_attention, dynamic=True) if compile else flex.flex_attention

    def __call__(self, query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
        if len(keys) == 1:  # plain causal attention has kernels of its own
            return aligned_attention(query, keys, values)
        mask = _block_mask(len(keys), query.shape[2], str(query.device))
        return self.attention(
            query.contiguous(), torch.cat(keys, dim=2), torch.cat(values, dim=2), block_mask=mask, enable_gqa=True
        )


def choose_attention(name: str, device: torch.device, head_size: int = 64) -> AlignedAttention:
    """The form called `name`; "auto" takes flex on CUDA devices where it compiles and agrees with the plain one.

    head_size: D of the head that is to use it, since not every size compiles everywhere.

    Raises:
        ValueError: unknown name, or "flex" where it does not work.
    """
    if name not in ATTENTIONS:
        raise ValueError(f"attention {name!r} is unknown: choose one of {', '.join(ATTENTIONS)}")
    if name == "plain" or (name == "auto" and device.type != "cuda"):
        return aligned_attention
    form = FlexAlignedAttention()
    reason = _failure(form, device, head_size)
    if reason is None:
        return form
    if name == "flex":
        raise ValueError(f"flex attention does not work on {device} ({reason}): choose attention plain")
    logger.warning("flex attention does not work on %s (%s): the plain form is used", device, reason)
    return aligned_attention


def _failure(form: AlignedAttention, device: torch.device, head_size: int = 64) -> str | None:
    """Why `form` cannot stand in for the plain one in training, tried on small cases; None if it can."""
    for passes, rows in ((2, 40), (3, 130)):
        generator = torch.Generator().manual_seed(0)
        shapes = [(1, 4, rows, head_size)] + [(1, 2, rows, head_size)] * 2 * passes
        leaves = [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]
        results = []
        for attend in (aligned_attention, form):
            try:
                output = attend(leaves[0], leaves[1 : 1 + passes], leaves[1 + passes :])
                results.append((output, *torch.autograd.grad(output.square().sum(), leaves)))
            except Exception as error:  # compilers fail in as many ways as there are compilers
                return f"{type(error).__name__}: {str(error).splitlines()[0]}"
        worst = max((a - b).abs().max().item() for a, b in zip(*results, strict=True))
        if worst > 0.05:
            return f"it differs from the plain form by {worst:.3g}"
    return None


@lru_cache(maxsize=256)
def _block_mask(passes: int, rows: int, device: str) -> flex.BlockMask:
    # tensors, not numbers: a compiled mask would be compiled again for every other number
    own, length = (torch.tensor(number, device=device) for number in (passes - 1, rows))

    def sees(_batch, _head, query_row, key_row):
        # pass s holds the row own - s behind the query's, pass 0 all rows before those
        source, age = key_row // length, query_row - key_row % length
        return torch.where(source == 0, age >= own, age == own - source)

    return flex.create_block_mask(sees, None, None, rows, passes * rows, device=device)
