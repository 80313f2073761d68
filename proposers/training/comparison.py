"""Whether one head drafts better than another on the same held-out answers, by more than noise.

Measured are greedy chains and EAGLE-2 trees, offline (evaluate.py, trees.py). The comparison is paired over answers: of
each answer, the difference of tau (tokens per verification). A head is better if the mean difference is above
`STANDARD_ERRORS` standard errors of the mean, for chains and for trees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..eagle2.head import EagleHead
from .evaluate import chain_acceptance, tau_of
from .features import FeatureSet
from .precision import autocast
from .trees import tree_tau

STANDARD_ERRORS = 2.0
#: With fewer answers the standard error itself is not known well enough.
MIN_ANSWERS = 8


@dataclass(frozen=True)
class HeldOut:
    """Drafts of one head along held-out answers: (tokens, verifications) of each answer, with chains and with trees."""

    chain: list[tuple[int, int]]
    tree: list[tuple[int, int]]

    @property
    def chain_tau(self) -> float:
        return tau_of(self.chain)

    @property
    def tree_tau(self) -> float:
        return tau_of(self.tree)


@dataclass(frozen=True)
class Difference:
    """Mean paired difference of tau over answers, and the mean's standard error; as a text, its 95% interval."""

    mean: float
    error: float

    @property
    def is_gain(self) -> bool:
        return self.mean > STANDARD_ERRORS * self.error

    def __str__(self) -> str:
        width = STANDARD_ERRORS * self.error
        return f"{self.mean:+.3f} ({self.mean - width:+.3f} to {self.mean + width:+.3f})"


@torch.no_grad()
def measure(
    head: EagleHead, data: FeatureSet, embedding: torch.Tensor, lm_head: torch.Tensor, ids: torch.Tensor
) -> HeldOut:
    """Draft along the answers of `data`; lm_head [draft_vocab, h], its rows are those of the target ids `ids`."""
    with autocast(lm_head.device):
        chain = chain_acceptance(head, data, embedding, lm_head, ids).by_answer
        return HeldOut(chain, tree_tau(head, data, embedding, lm_head, ids))


def compare(before: HeldOut, after: HeldOut) -> dict[str, Difference]:
    """Return the paired differences of tau by name, "chain" and "tree"."""
    return {name: _difference(getattr(before, name), getattr(after, name)) for name in ("chain", "tree")}


def is_better(differences: dict[str, Difference]) -> bool:
    """Return whether all differences are gains."""
    return all(one.is_gain for one in differences.values())


def _difference(before: list[tuple[int, int]], after: list[tuple[int, int]]) -> Difference:
    pairs = [new[0] / new[1] - old[0] / old[1] for old, new in zip(before, after, strict=True) if old[1] and new[1]]
    count = len(pairs)
    if count < MIN_ANSWERS:
        return Difference(0.0, math.inf)
    mean = sum(pairs) / count
    variance = sum((one - mean) ** 2 for one in pairs) / (count - 1)
    return Difference(mean, math.sqrt(variance / count))
