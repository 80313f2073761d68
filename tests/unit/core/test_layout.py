"""Positions and masks, against the oracle."""

import pytest
import torch

from tests.doubles import oracle
from tests.doubles.oracle_tensors import to_tree
from vllm_specplug.core.layout import ancestor_bits, lay_out


def check(trees, layout, context_lens):
    width = layout.mask.shape[1]
    for request, rows in enumerate(trees):
        size, context = len(rows), context_lens[request]
        positions = [context + oracle.depth(rows, row) for row in range(size)]
        assert layout.positions[request].tolist() == positions + [context] * (width - size)
        paths = [set(oracle.path_to(rows, row)) for row in range(size)] + [set()] * (width - size)
        assert layout.mask[request].tolist() == [[column in path for column in range(width)] for path in paths]


def test_layout_equals_the_oracle_on_2000_trees():
    rng = oracle.seeded(10)
    trees = [oracle.random_tree(rng, 18, 9) for _ in range(2000)]
    context_lens = [rng.randrange(5000) for _ in trees]
    check(trees, lay_out(to_tree(trees), torch.tensor(context_lens, dtype=torch.int32)), context_lens)


@pytest.mark.parametrize("max_depth", [0, 1, 2, 3, 4, 7, 8])
def test_a_known_depth_bound_suffices(max_depth):
    rng = oracle.seeded(12)
    trees = [oracle.random_tree(rng, 12, 9) for _ in range(300)]
    trees = [rows for rows in trees if max(oracle.depth(rows, row) for row in range(len(rows))) <= max_depth]
    trees.append([(0, row - 1) for row in range(max_depth + 1)])
    check(trees, lay_out(to_tree(trees), torch.zeros(len(trees)), max_depth), [0] * len(trees))


@pytest.mark.parametrize("width", [1, 5, 63, 64, 65, 130])
def test_ancestor_bits_hold_the_mask(width):
    mask = torch.rand(3, width, width, generator=torch.Generator().manual_seed(width)) < 0.5
    words = ancestor_bits(mask)
    assert words.shape == (3, width, -(-width // 64)) and words.dtype == torch.int64
    for column in range(words.shape[2] * 64):
        bit = (words[:, :, column // 64] >> (column % 64)) & 1
        assert torch.equal(bit.bool(), mask[:, :, column] if column < width else torch.zeros(3, width).bool())
