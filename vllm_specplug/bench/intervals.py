"""Intervals of speedups: how far they depend on the questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_RESAMPLES, _FEWEST = 2000, 5


def speedup_interval(
    batches: Sequence[dict[str, Any]], baseline: Sequence[dict[str, Any]]
) -> tuple[float, float] | None:
    """Return the 95% interval of a speedup by bootstrap over the questions; None for fewer than five.

    All passes over a question, and all questions that ran at once, are drawn together.

    Args:
        batches: the report's ``batches`` of a method.
        baseline: those of plain decoding, in the same order.
    """
    sums: dict[tuple[str, ...], np.ndarray] = {}
    for own, plain in zip(batches, baseline, strict=True):
        measured = np.array([own["tokens"], own["seconds"], plain["tokens"], plain["seconds"]], dtype=float)
        asked = tuple(own["questions"])
        sums[asked] = sums[asked] + measured if asked in sums else measured
    if len(sums) < _FEWEST:
        return None
    drawn = np.random.default_rng(0).integers(len(sums), size=(_RESAMPLES, len(sums)))
    tokens, seconds, plain_tokens, plain_seconds = np.array(list(sums.values()))[drawn].sum(axis=1).T
    low, high = np.quantile(tokens / seconds / (plain_tokens / plain_seconds), (0.025, 0.975))
    return float(low), float(high)
