"""The proof's trees, its bound and its verdict, on logits that are made here."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from vllm_specplug.core.proof import CONTROL_SHARE, MARGIN, Evidence, Row, grow_proof_tree

VOCAB = 50


def wrong():
    return itertools.count(1001)


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 5, 8, 20])
@pytest.mark.parametrize("max_depth", [1, 2, 4])
def test_trees_hold_the_text_behind_wrong_siblings(num_nodes, max_depth):
    text = list(range(10))
    tree = grow_proof_tree(text, wrong(), num_nodes, max_depth, max(1, max_depth - 1))
    assert len(tree.token_ids) <= num_nodes and tree.num_rows == len(tree.token_ids) + 1
    assert all(parent < row for row, parent in enumerate(tree.parents, start=1))
    path = tree.path_rows
    assert [tree.token_ids[row - 1] for row in path[1:]] == text[: len(path) - 1]
    assert [tree.parents[row - 1] for row in path[1:]] == path[:-1]
    assert len(path) - 1 == min(max_depth, max(1, math.ceil(num_nodes / 2)))
    if num_nodes > 1:  # the accepted rows are not where a chain would have them
        assert path[1] == 2


def test_a_wrong_branch_has_two_rows():
    tree = grow_proof_tree(range(10), wrong(), 8, 4, 3)
    first, second = tree.branch_rows
    assert tree.parents[second - 1] == first and tree.parents[first - 1] == tree.path_rows[2]
    assert min(tree.token_ids[row - 1] for row in tree.branch_rows) > 1000


def test_a_tree_can_be_filled_up():
    tree = grow_proof_tree(range(10), wrong(), 8, 2, 1, width=20)
    assert len(tree.token_ids) == 20 and set(tree.parents[4:]) == {0}


def row(name: str, plain: torch.Tensor, noise: float) -> Row:
    generator = torch.Generator().manual_seed(len(name))
    return Row(name, plain + noise * torch.randn(VOCAB, generator=generator), plain)


def evidence(plain=1e-3, trees=1e-3, control=1.0, dtype=torch.bfloat16) -> Evidence:
    logits = torch.linspace(-1, 1, VOCAB)
    found = Evidence(dtype, 2)
    found.plain = [row("plain", logits, plain)]
    found.trees = [row("first", logits, trees), row("second", logits, 2 * trees)]
    found.control = [row("control", logits, control)]
    return found


def test_in_float32_the_bound_follows_two_plain_runs():
    found = evidence(plain=0.1, dtype=torch.float32)
    assert found.bound() == pytest.approx(MARGIN * found.plain[0].difference())
    # Where they agree in every bit, it is rounding.
    assert evidence(plain=0.0, dtype=torch.float32).bound() < 1e-4
    assert 0 < evidence(plain=0.0).noise() < 0.1


def test_in_16_bits_the_rows_are_judged_together_by_the_control():
    found = evidence()
    assert found.bound() == pytest.approx(CONTROL_SHARE * found.control[0].difference())
    found.trees.append(row("an outlier", found.plain[0].plain, 0.4))
    assert found.trees[-1].difference() > found.bound() > found.difference(found.trees) and found.fault() == ""
    found.trees[:2] = [row(name, found.plain[0].plain, 0.4) for name in ("first", "second")]
    assert found.fault().startswith("first differs by 0.")


def test_the_first_row_that_differs_is_named():
    assert evidence(trees=0.5).fault().startswith("first differs by 0.")
    found = evidence(trees=0.0)
    found.trees[1] = row("second", found.trees[1].plain, 0.5)
    assert found.fault().startswith("second differs by 0.")


def test_a_control_that_agrees_has_no_power():
    assert "has no power" in evidence(control=1e-3).fault()
    assert not evidence(control=1e-3).has_power()


def test_on_a_gpu_the_trees_alone_decide():
    """The least control is an estimate there; a tree that differs is a fault all the same."""
    found, wrong = (replace(evidence(control=1e-3, trees=trees), needs_power=False) for trees in (1e-3, 0.5))
    assert found.fault() == "" and found.is_weak() and not found.is_final()
    assert wrong.fault().startswith("first differs by 0.")
    assert not replace(evidence(), needs_power=False).is_weak() and not evidence(control=1e-3).is_weak()


def test_a_tree_without_siblings_needs_no_control():
    found = evidence()
    found.control = []
    assert found.fault() == ""


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_fail(value):
    found = evidence()
    found.trees[0].logits[3] = value
    assert found.fault().startswith("first differs by inf")


def test_other_tokens_fail_in_float32():
    found = evidence(plain=0.0, trees=0.0, dtype=torch.float32)
    assert found.fault() == ""
    swapped = found.trees[1].plain.clone()
    swapped[0] = 1.0 + 3e-5  # less than the bound on average, and yet another token
    found.trees[1] = Row("second", swapped, found.trees[1].plain.index_fill(0, torch.tensor([0]), 1.0 - 3e-4))
    assert "second" in found.fault()


def test_where_plain_runs_agree_in_every_bit_trees_must():
    found = evidence(plain=0.0, trees=0.0)
    found.keeps_bits = True
    assert found.in_bits() and found.fault() == ""
    found.trees[1].logits[7] += 1e-6
    assert found.fault() == f"second differs from plain decoding in 1 of {VOCAB} logits" and found.is_certain()
    found.keeps_bits = False  # another engine
    assert not found.in_bits() and found.fault() == ""


def test_where_plain_runs_differ_bits_are_not_compared():
    found = evidence()
    found.keeps_bits = True
    assert not found.in_bits() and found.fault() == ""


def test_a_control_with_the_bits_of_plain_decoding_has_no_power():
    found = evidence(plain=0.0, trees=0.0, control=0.0)
    found.keeps_bits = True
    assert "has no power" in found.fault()
