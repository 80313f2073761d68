"""The set of sub-layers of the target that a drafting forward skips (SWIFT, section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LayerSet:
    """The attention and MLP sub-layers to skip; the first and the last layer always run.

    Attributes:
        num_layers: layers of the target (``L``).
        attention, mlp: layers whose attention or MLP is skipped, ascending.
    """

    num_layers: int
    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, layers in (("attention", self.attention), ("mlp", self.mlp)):
            if list(layers) != sorted(set(layers)) or (
                layers and not 1 <= layers[0] <= layers[-1] < self.num_layers - 1
            ):
                raise ValueError(
                    f"{name}={layers}: give ascending layers from 1 to {self.num_layers - 2}; the first and the last "
                    f"of {self.num_layers} always run"
                )

    @property
    def num_skipped(self) -> int:
        """Number of skipped sub-layers."""
        return len(self.attention) + len(self.mlp)

    @classmethod
    def uniform(cls, num_layers: int, skip_ratio: float) -> LayerSet:
        """Skip both sub-layers of evenly spaced layers, about every second layer at a ratio of one half."""
        inner, count = num_layers - 2, num_choices(num_layers, skip_ratio)
        layers = [1 + int((i + 0.5) * inner / (count / 2)) for i in range(count // 2)]
        odd = [] if count % 2 == 0 else [next(i for i in range(1, num_layers - 1) if i not in layers)]
        return cls(num_layers, tuple(layers), tuple(sorted(layers + odd)))

    @classmethod
    def from_vector(cls, vector: np.ndarray) -> LayerSet:
        """Make a layer set from a vector as returned by ``vector``."""
        attention, mlp = (tuple((np.flatnonzero(half) + 1).tolist()) for half in np.split(np.asarray(vector), 2))
        return cls(len(vector) // 2 + 2, attention, mlp)

    def vector(self) -> np.ndarray:
        """Return float64 ``[2 * (num_layers - 2)]``; 1 where a sub-layer is skipped: all attentions, then all MLPs."""
        inner = self.num_layers - 2
        vector = np.zeros(2 * inner)
        vector[[layer - 1 for layer in self.attention]] = 1.0
        vector[[inner + layer - 1 for layer in self.mlp]] = 1.0
        return vector


def num_choices(num_layers: int, skip_ratio: float) -> int:
    """Return how many sub-layers to skip: ``skip_ratio`` of ``2 * (num_layers - 2)``."""
    return round(skip_ratio * 2 * (num_layers - 2))
