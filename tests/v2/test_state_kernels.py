"""Kernels of recurrent states over trees against plain torch, on random trees of several requests in one launch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.doubles.tree_states import (
    Forest,
    conv_step,
    gated_delta_step,
    mamba2_step,
    run_accepted,
    run_paths,
)
from vllm_specplug.gpu.kernels.conv_tree import commit_windows, conv_tree
from vllm_specplug.gpu.kernels.gated_delta_tree import GatedDeltaWeights, gated_delta_tree
from vllm_specplug.gpu.kernels.mamba2_tree import Mamba2Weights, mamba2_tree
from vllm_specplug.types import PADDING

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Of inputs; states are float32 in the first two.
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
NUM_BLOCKS, NUM_TOKENS = 6, 90


def make_forest(seed: int, most: int = 6) -> Forest:
    """Four requests: a tree, a plain row, a tree without a context, a larger tree."""
    rng = random.Random(seed)
    sizes = [5, 1, 3, most]
    parents = [[-1, *(rng.randrange(max(0, row - 3), row) for row in range(1, size))] for size in sizes]
    starts = [2, 7, 9, 14]  # beside other rows
    return Forest(parents, blocks=rng.sample(range(1, NUM_BLOCKS), 4), contexts=[9, 5, 0, 30], starts=starts)


def accepted_paths(forest: Forest, seed: int) -> tuple[list[list[int]], torch.Tensor]:
    """Flat rows that are accepted, by tree; and as the commit takes them."""
    rng = random.Random(seed)
    paths = [forest.path(tree, rng.randrange(len(one))) for tree, one in enumerate(forest.parents)]
    width = max(len(one) for one in paths) + 1
    rows = [[*one, *[PADDING] * (width - len(one))] for one in paths]
    return paths, torch.tensor(rows, device=DEVICE)


class Random:
    """Random tensors on the device."""

    def __init__(self, seed: int, dtype: torch.dtype):
        self._generator, self._dtype = torch.Generator().manual_seed(seed), dtype

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator).to(DEVICE, dtype or self._dtype)

    def rows(self, width: int) -> torch.Tensor:
        """Rows of a wider tensor."""
        return self(NUM_TOKENS, width + 8)[:, 4 : width + 4]


def check(output: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(output.double(), expected.double(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def tree_rows(forest: Forest) -> Sequence[int]:
    pairs = zip(forest.starts, forest.parents, strict=True)
    return [start + row for start, one in pairs if len(one) > 1 for row in range(len(one))]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", DTYPES)
def test_convolution(seed, dtype):
    draw, forest, channels, width = (
        Random(seed, dtype),
        make_forest(seed, 6 if seed or dtype != torch.float32 else 67),
        12,
        (4, 4, 3)[seed],
    )
    inputs, weight, bias = draw.rows(channels), draw(channels, width), draw(channels) if seed else None
    windows = draw(NUM_BLOCKS, width - 1, channels).transpose(1, 2) if seed < 2 else draw(NUM_BLOCKS, channels, 2)
    output = draw(NUM_TOKENS, channels)
    expected = output.double()
    step, kept = conv_step(inputs, weight, bias, with_silu=seed != 1), windows.clone()
    run_paths(forest, kept, step, expected)
    conv_tree(forest.on_device(DEVICE), inputs, windows, weight, bias, output, silu=seed != 1)
    check(output, expected, dtype)
    assert torch.equal(windows, kept)
    paths, sources = accepted_paths(forest, seed)
    run_accepted(forest, kept, step, paths)
    commit_windows(forest.on_device(DEVICE), sources, inputs, windows)
    assert torch.equal(windows, kept)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", DTYPES)
def test_mamba2(seed, dtype):
    draw, forest, (heads, size, state_size) = Random(seed, dtype), make_forest(seed), ((4, 8, 16), (2, 12, 5))[seed % 2]
    weights = Mamba2Weights(
        -draw(heads, dtype=torch.float32).exp(), draw(heads), draw(heads), num_groups=(2, 1)[seed % 2]
    )
    rows = draw.rows(heads * size + 2 * weights.num_groups * state_size)
    dt, output = draw.rows(heads), draw(NUM_TOKENS, heads * size)
    of_state = dtype if dtype == torch.float16 else torch.float32
    states = draw(NUM_BLOCKS, 2, heads, size, state_size, dtype=of_state)[:, 0]  # blocks with other things between
    step, kept, expected = mamba2_step(weights, rows, dt, (heads, size, state_size)), states.clone(), output.double()
    run_paths(forest, kept, step, expected)
    mamba2_tree(forest.on_device(DEVICE), weights, rows, dt, states, output)
    check(output, expected, dtype)
    assert torch.equal(states, kept)
    paths, sources = accepted_paths(forest, seed)
    run_accepted(forest, kept, step, paths)
    mamba2_tree(forest.on_device(DEVICE), weights, rows, dt, states, source_rows=sources)
    check(states, kept, of_state)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_delta_rule(seed, dtype):
    draw, forest, (heads, values, keys) = Random(seed, dtype), make_forest(seed), ((4, 8, 16), (2, 12, 5))[seed % 2]
    weights = GatedDeltaWeights(draw(heads, dtype=torch.float32), draw(heads), num_key_heads=(2, 1)[seed % 2])
    rows = draw.rows(2 * weights.num_key_heads * keys + heads * values)
    a, b, output = draw.rows(heads), draw.rows(heads), draw(NUM_TOKENS, heads * values)
    of_state = dtype if dtype == torch.float16 else torch.float32
    states = draw(NUM_BLOCKS, 2, heads, values, keys, dtype=of_state)[:, 0]
    step = gated_delta_step(weights, rows, a, b, (heads, values, keys))
    kept, expected = states.clone(), output.double()
    run_paths(forest, kept, step, expected)
    gated_delta_tree(forest.on_device(DEVICE), weights, rows, a, b, states, output)
    check(output, expected, dtype)
    assert torch.equal(states, kept)
    paths, sources = accepted_paths(forest, seed)
    run_accepted(forest, kept, step, paths)
    gated_delta_tree(forest.on_device(DEVICE), weights, rows, a, b, states, source_rows=sources)
    check(states, kept, of_state)


@pytest.mark.parametrize("seed", range(1, 3))
def test_a_wrong_parent_shows(seed):
    draw, forest = Random(seed, torch.float32), make_forest(seed)
    inputs, weight, windows = draw.rows(8), draw(8, 4), draw(NUM_BLOCKS, 8, 3)
    outputs = []
    chain = replace(forest, parents=[list(range(-1, len(one) - 1)) for one in forest.parents])
    for one in (forest, chain):
        outputs.append(torch.zeros(NUM_TOKENS, 8, device=DEVICE))
        conv_tree(one.on_device(DEVICE), inputs, windows, weight, None, outputs[-1], silu=False)
    assert not torch.allclose(outputs[0][tree_rows(forest)], outputs[1][tree_rows(forest)], atol=0.1)
