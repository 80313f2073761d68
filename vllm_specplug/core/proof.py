"""The proof at start: the trees that are tried, and the rule for "equal to plain decoding".

Text of known tokens is read plainly and through trees that contain it beside wrong siblings.  A control without the
mask must not agree with plain decoding.

On the CPU engine, logits of the same token after the same text must have the same bits.  Elsewhere, and for a model
whose own kernels round differently in batches of other shapes, they must agree within a bound that the engine itself
gives: how much two plain runs differ that put the tokens into batches of other shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

#: A tree may differ from plain decoding by so many times the difference of two plain runs.  The plain runs share their
#: attention kernel, trees have another one, and few rows are compared.
MARGIN = 4.0
#: Two plain runs may agree in every bit, because their kernels compute each row alike.  The bound is then this part of
#: the logits' spread, times the root of the number of layers: roundings add up like a random walk.  In 16 bits it is
#: 2.6 roundings (4 times the 0.29 that one has on average, five of them in a layer); in float32 kernels differ by more
#: than rounding, because they compute exponentials by other polynomials.
ROUNDING = {torch.float32: 1e-5, torch.float16: 2.6 * 2**-10, torch.bfloat16: 2.6 * 2**-7}
#: In 16 bits rounding grows through the layers, and single rows differ by ten times as much as others.  The rows are
#: then judged together: by this share of their difference with the mask off.  On SmolLM2 in bfloat16 trees differed
#: by 0.01 to 0.12 of it (40 texts, ``benchmarks/results/proof_smollm2.json``), not compiled by up to 0.21.
CONTROL_SHARE = 0.25


#: How a fault begins of which trees are not the cause.
WITHOUT_TREES = "a step without trees"


class ProofFailed(RuntimeError):
    """Trees do not compute here what plain decoding computes."""


@dataclass(frozen=True)
class ProofTree:
    """A tree that contains known text beside wrong siblings.

    Attributes:
        token_ids: tokens of the nodes, parent-first; the root is left out.
        parents: row of each node's parent; the root is row 0.
        path_rows: rows of the known text, the root first.
        branch_rows: a wrong sibling and its child; empty if there was no room.
    """

    token_ids: list[int]
    parents: list[int]
    path_rows: list[int]
    branch_rows: list[int]

    @property
    def num_rows(self) -> int:
        return len(self.token_ids) + 1


def grow_proof_tree(
    text: Sequence[int], wrong: Iterator[int], num_nodes: int, max_depth: int, branch_depth: int, width: int = 0
) -> ProofTree:
    """Make a tree whose path is the beginning of ``text``.

    Wrong siblings come before the right node, so that no accepted row is where a chain would have it.

    Args:
        text: tokens after the root.
        wrong: tokens that are not in ``text``.
        num_nodes: most nodes, the root left out.
        max_depth: most depth of the path.
        branch_depth: depth of the wrong sibling that gets a child.
        width: nodes to fill up to, with wrong children of the root.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    path_rows = [0]
    branch_rows: list[int] = []

    def add(token: int, parent: int) -> int:
        token_ids.append(token)
        parents.append(parent)
        return len(token_ids)

    for depth in range(1, max_depth + 1):
        room = num_nodes - len(token_ids)
        if room < 1:
            break
        if room > 1:
            if depth == branch_depth + 1 and branch_rows:
                branch_rows.append(add(next(wrong), branch_rows[0]))
            else:
                row = add(next(wrong), path_rows[-1])
                if depth == branch_depth:
                    branch_rows.append(row)
        path_rows.append(add(text[depth - 1], path_rows[-1]))
    while len(token_ids) < width:
        add(next(wrong), 0)
    return ProofTree(token_ids, parents, path_rows, branch_rows if len(branch_rows) == 2 else [])


@dataclass(frozen=True)
class Row:
    """Logits of one token after one text, by trees and plainly.

    Attributes:
        name: where the row is, for messages.
        logits, plain: float32 ``[vocab_size]``.
    """

    name: str
    logits: torch.Tensor
    plain: torch.Tensor

    def difference(self) -> float:
        """Return the root mean square of the difference; infinite if the logits are not finite."""
        value = float((self.logits - self.plain).square().mean().sqrt())
        return value if value < float("inf") else float("inf")

    def num_differing(self) -> int:
        """Return how many logits differ in a bit; logits that are not finite differ."""
        same = (self.logits == self.plain) & self.logits.isfinite()
        return int((~same).sum())


@dataclass
class Evidence:
    """Results of a proof.

    Attributes:
        dtype: of the model.
        num_layers: of the model.
        keeps_bits: whether the engine's kernels compute a row alike in every batch and in trees: the CPU engine's do.
        plain: pairs of two plain runs.
        trees: rows of trees.
        control: rows of a tree without its mask; empty if a tree has too few nodes to need a mask.
        needs_power: whether a control that arithmetic explains is a fault.
    """

    dtype: torch.dtype
    num_layers: int
    keeps_bits: bool = False
    plain: list[Row] = field(default_factory=list)
    trees: list[Row] = field(default_factory=list)
    control: list[Row] = field(default_factory=list)
    needs_power: bool = True

    def in_bits(self) -> bool:
        """Return whether bits are compared: two plain runs of the model agree in all of them."""
        return self.keeps_bits and not any(row.num_differing() for row in self.plain)

    def is_certain(self) -> bool:
        """Return whether a fault cannot be rounding: a tree row has other bits.  No other text is tried then."""
        return self.in_bits() and any(row.num_differing() for row in self.trees)

    def noise(self) -> float:
        """Return the difference that arithmetic alone explains, by two plain runs and by rounding."""
        spread = max(float((row.plain - row.plain.mean()).square().mean().sqrt()) for row in self.plain)
        return max(
            MARGIN * max(row.difference() for row in self.plain),
            ROUNDING[self.dtype] * math.sqrt(self.num_layers) * spread,
        )

    def bound(self) -> float:
        """Return the largest ``difference`` of the trees that passes."""
        if self.in_bits():
            return 0.0
        if self.dtype == torch.float32 or not self.control:
            return self.noise()
        return max(self.noise(), CONTROL_SHARE * self.difference(self.control))

    def difference(self, rows: Sequence[Row]) -> float:
        """Return how much rows differ: in float32 the largest of them, in 16 bits their root mean square."""
        found = [row.difference() for row in rows]
        if self.dtype == torch.float32:
            return max(found)
        return math.sqrt(sum(value * value for value in found) / len(found))

    def has_power(self) -> bool:
        """Return whether a tree without its mask differs by more than arithmetic explains."""
        return not self.control or self.difference(self.control) > self.noise()

    def is_weak(self) -> bool:
        """Return whether a proof without power counts as passed."""
        return not self.needs_power and not self.has_power()

    def is_final(self) -> bool:
        """Return whether no other text is to be tried."""
        return self.is_certain() or (not self.fault() and not self.is_weak())

    def fault(self) -> str:
        """Return the first error; empty if the proof has passed."""
        return self._fault_in_bits() if self.in_bits() else self._fault_by_bound()

    def _fault_in_bits(self) -> str:
        for row in self.trees:
            if (count := row.num_differing()) > 0:
                return f"{row.name} differs from plain decoding in {count} of {len(row.plain)} logits"
        if self.control and not any(row.num_differing() for row in self.control):
            return "the proof has no power: with the mask off the rows have the bits of plain decoding"
        return ""

    def _fault_by_bound(self) -> str:
        bound = self.bound()
        if self.difference(self.trees) > bound:
            row = next(row for row in self.trees if row.difference() > bound)
            return (
                f"{row.name} differs by {row.difference():.2g} from plain decoding; the rows together by "
                f"{self.difference(self.trees):.2g}, bound {bound:.2g}"
            )
        if self.dtype == torch.float32:
            for row in self.trees:
                if (other := _other_token(row, bound)) is not None:
                    return f"{row.name} has token {other[0]}, plain decoding {other[1]}"
        if self.needs_power and not self.has_power():
            return (
                "the proof has no power: with the mask off the rows differ by "
                f"{self.difference(self.control):.2g} from plain decoding, as much as arithmetic explains"
            )
        return ""

    def summary(self) -> dict[str, float]:
        """Return the numbers of the proof: differences are root mean squares over the vocabulary, in logits."""
        return {
            "rows": len(self.trees),
            "in_bits": float(self.in_bits()),
            "difference": self.difference(self.trees),
            "bound": self.bound(),
            "plain": max(row.difference() for row in self.plain),
            "control": self.difference(self.control) if self.control else 0.0,
        }


def _other_token(row: Row, bound: float) -> tuple[int, int] | None:
    """Return the greedy tokens by tree and plainly if they differ by more than rounding."""
    tree, plain = int(row.logits.argmax()), int(row.plain.argmax())
    gap = float(row.plain[plain] - row.plain[tree])
    return (tree, plain) if tree != plain and gap > bound else None
