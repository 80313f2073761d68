"""Gumbel noise as a function of (seed, token), as in vLLM's CPU sampler.

That sampler draws one integer seed per emitted token and picks the largest ``logit + noise``.  The noise of future
tokens can therefore be computed in advance, from a copy of the generator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: SplitMix64 in signed 64-bit integers, whose products wrap as unsigned ones do.
_GAMMA, _FIRST, _SECOND = (value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))

#: Seeds are drawn from 0 to this value, which is excluded.
SEED_RANGE = 2**31


def gumbel_noise(seeds: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Compute standard Gumbel noise for tokens.

    Args:
        seeds: int64, broadcastable to ``token_ids``.
        token_ids: int64.

    Returns:
        float32, finite.
    """
    return -torch.log(-torch.log(uniform_noise(seeds, token_ids))).float()


def uniform_noise(seeds: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Compute uniform random numbers between 0 and 1, float64, as a function of int64 seeds and indices."""
    bits = _shift(_mix(_mix(seeds) + (index + 1) * _GAMMA), 11)
    return (bits.double() + 0.5) * 2.0**-53


def derived_seeds(seeds: torch.Tensor, *keys: torch.Tensor | int) -> torch.Tensor:
    """Derive a seed for each combination of a seed and keys: int64, broadcast over all of them."""
    for key in keys:
        seeds = _mix(seeds + _GAMMA) + key
    return seeds


def upcoming_seeds(generators: Sequence[torch.Generator | None], count: int) -> torch.Tensor:
    """Return the seeds that each generator will draw next, without changing its state.

    Args:
        generators: CPU generators; for None the seeds are 0.
        count: seeds per generator.

    Returns:
        int64 ``[len(generators), count]``.
    """
    seeds = torch.zeros(len(generators), count, dtype=torch.int64)
    copy = torch.Generator()
    for row, generator in enumerate(generators):
        if generator is not None:
            copy.set_state(generator.get_state())
            seeds[row] = torch.randint(0, SEED_RANGE, (count,), generator=copy)
    return seeds


def _mix(values: torch.Tensor) -> torch.Tensor:
    values = (values ^ _shift(values, 30)) * _FIRST
    values = (values ^ _shift(values, 27)) * _SECOND
    return values ^ _shift(values, 31)


def _shift(values: torch.Tensor, count: int) -> torch.Tensor:
    """Shift right and fill with zeros: torch would repeat the sign bit."""
    return (values >> count) & ((1 << (64 - count)) - 1)
