"""Attention for training a drafter on its own features: HASS's context alignment, EAGLE-3's training-time test.

In pass n the query of row t reads the last n-1 rows from the drafter's own passes, one diagonal for each pass, and the
rows before them from the target's features. The mask is a causal one shifted left by n-1, plus n-1 diagonals. Two
implementations compute the same values:

    aligned_attention       plain torch with masked scores, on any device; the reference
    FlexAlignedAttention    torch's flex attention over the keys of all passes side by side, on devices that compile it

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

#: (query [B, H, T, D], keys, values: one [B, G, T, D] for each pass so far) -> [B, H, T, D]
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

    compile: False runs torch's uncompiled flex attention, for comparison.
    """

    def __init__(self, compile: bool = True):
        self.attention = torch.compile(flex.flex_attention, dynamic=True) if compile else flex.flex_attention

    def __call__(self, query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
        if len(keys) == 1:  # torch has faster kernels for plain causal attention
            return aligned_attention(query, keys, values)
        mask = _block_mask(len(keys), query.shape[2], str(query.device))
        return self.attention(
            query.contiguous(), torch.cat(keys, dim=2), torch.cat(values, dim=2), block_mask=mask, enable_gqa=True
        )


def choose_attention(name: str, device: torch.device, head_size: int = 64) -> AlignedAttention:
    """The implementation called `name`; "auto" takes flex on CUDA devices where it compiles and is correct, else plain.

    head_size: D of the draft head; flex does not compile for every size on every device.

    Raises:
        ValueError: unknown name, or "flex" where it does not work.
    """
    if name not in ATTENTIONS:
        raise ValueError(f"attention {name!r} is unknown: choose one of {', '.join(ATTENTIONS)}")
    if name == "plain" or (name == "auto" and device.type != "cuda"):
        return aligned_attention
    flex_attention = FlexAlignedAttention()
    reason = _failure(flex_attention, device, head_size)
    if reason is None:
        return flex_attention
    if name == "flex":
        raise ValueError(f"flex attention does not work on {device} ({reason}): choose attention plain")
    logger.warning("Flex attention does not work on %s (%s); training uses plain attention.", device, reason)
    return aligned_attention


def _failure(attention: AlignedAttention, device: torch.device, head_size: int = 64) -> str | None:
    """Compare `attention` with the plain one on small cases: why it cannot be used in training, or None."""
    for passes, rows in ((2, 40), (3, 130)):
        generator = torch.Generator().manual_seed(0)
        shapes = [(1, 4, rows, head_size)] + [(1, 2, rows, head_size)] * 2 * passes
        leaves = [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]
        results = []
        for attend in (aligned_attention, attention):
            try:
                output = attend(leaves[0], leaves[1 : 1 + passes], leaves[1 + passes :])
                results.append((output, *torch.autograd.grad(output.square().sum(), leaves)))
            except Exception as error:  # each compiler has exceptions of its own
                return f"{type(error).__name__}: {str(error).splitlines()[0]}"
        worst = max((a - b).abs().max().item() for a, b in zip(*results, strict=True))
        if worst > 0.05:
            return f"it differs from plain attention by {worst:.3g}"
    return None


@lru_cache(maxsize=256)
def _block_mask(passes: int, rows: int, device: str) -> flex.BlockMask:
    # Tensors, because a mask over Python numbers is compiled again for each new number.
    own, length = (torch.tensor(number, device=device) for number in (passes - 1, rows))

    def sees(_batch, _head, query_row, key_row):
        # Pass s > 0 gives the row that is own - s rows before the query's; pass 0 gives all rows before those.
        source, age = key_row // length, query_row - key_row % length
        return torch.where(source == 0, age >= own, age == own - source)

    return flex.create_block_mask(sees, None, None, rows, passes * rows, device=device)
