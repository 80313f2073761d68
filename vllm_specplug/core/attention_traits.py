"""Additions of a layer's attention to plain softmax, the same for every tree attention kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True, eq=False)
class AttentionTraits:
    """Additions of one layer to plain softmax attention; the defaults add nothing.

    The distance of a visible key is how many visible keys of the row come after it, up to the row's own: 0 for itself.

    Attributes:
        window: a row sees the keys at distances below it, itself included; 0 for all visible keys.
        local: a row sees the keys since the last position that is a multiple of it; 0 for all visible keys.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``, after the scale; 0 for no cap.
        sinks: float32 ``[num_heads]``; one more score per head in the softmax's denominator, without a value.
        alibi_slopes: float32 ``[num_heads]``; slope times distance is subtracted from a capped score.
    """

    window: int = 0
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    local: int = 0

    @cached_property
    def as_arguments(self) -> tuple[object, ...]:
        """Arguments of the C++ operators."""
        return self.window, self.soft_cap, self.sinks, self.alibi_slopes, self.local

    @property
    def adds_nothing(self) -> bool:
        return not (self.window or self.local or self.soft_cap) and self.sinks is None and self.alibi_slopes is None


NO_TRAITS = AttentionTraits()
