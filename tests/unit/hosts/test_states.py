"""Rows of trees by depth, and the commit of states, against a loop over nodes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_specplug.cpu.kernels.state_scan import Sequences
from vllm_specplug.cpu.state_layers import StateLayers
from vllm_specplug.cpu.states import StateStep, commit_states, compute, state_rows

#: Rows of each request in the forward: a tree, a prompt, a tree, a root, a prompt with drafts that do not count.
PARENTS = torch.tensor(
    [[-1, 0, 0, 1, 1, 2], [-1, -1, -1, -1, -1, -1], [-1, 0, 1, 1, -1, -1], [-1] * 6, [-1, 0, 0, -1, -1, -1]]
)
NUM_ROWS = torch.tensor([6, 1, 4, 1, 3])
SCHEDULED = np.array([6, 5, 4, 1, 7])
CONTEXTS = torch.tensor([10, 0, 7, 9, 4])
LAST = torch.from_numpy(np.cumsum(SCHEDULED))
ROW_START = LAST - NUM_ROWS


@pytest.fixture
def rows():
    return state_rows(PARENTS, NUM_ROWS, ROW_START, SCHEDULED, CONTEXTS)


def test_rows_are_sorted(rows):
    assert rows.requests.tolist() == [0, 2] and rows.contexts.tolist() == [10, 7]
    assert rows.rows.tolist() == [0, 1, 2, 3, 4, 5, 11, 12, 13, 14]
    assert [level.rows.tolist() for level in rows.levels] == [[0, 11], [1, 2, 12], [3, 4, 5, 13, 14]]
    assert [level.parents.tolist() for level in rows.levels] == [[0, 0], [0, 0, 1], [0, 0, 1, 2, 2]]
    assert rows.others.tolist() == [1, 3, 4] and rows.other_lens.tolist() == [5, 1, 5]
    assert rows.other_rows.tolist() == [*range(6, 11), 15, *range(16, 21)]


def test_without_trees():
    rows = state_rows(PARENTS[3:], NUM_ROWS[3:], ROW_START[3:] - 15, SCHEDULED[3:], CONTEXTS[3:])
    assert not rows.levels and not len(rows.rows) and rows.other_rows.tolist() == [0, *range(1, 6)]


def update(state: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """No two orders of values give the same state."""
    return 1.5 * state + value


def core(sequences, before, after, inputs, output):
    """Sequences of one number per row."""
    (values,) = inputs
    for rows, source, place in sequences:
        state = before[0][source] if source >= 0 else torch.zeros(1, dtype=torch.float64)
        for row in rows:
            state = update(state, values[row])
            output[row : row + 1] = state
        after[0][place] = state


@pytest.fixture
def layer():
    return SimpleNamespace(kv_cache=(torch.arange(1.0, 13.0).double().unsqueeze(1),))


def run(layer, rows, blocks, values):
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), rows.other_lens.cumsum(0)])
    others = Sequences(starts, torch.tensor([-1, 10, 11]), torch.tensor([9, 10, 11]))
    step, output = StateStep(others, rows, blocks), torch.zeros(len(values), 1, dtype=torch.float64)
    compute("one", layer.kv_cache, step, core, (values,), output)
    return step, output


def test_a_node_continues_its_parent(layer, rows):
    blocks, before = torch.tensor([3, 5]), layer.kv_cache[0].clone()
    values = torch.randn(int(LAST[-1]), 1, dtype=torch.float64)
    _, output = run(layer, rows, blocks, values)
    for tree, request in enumerate((0, 2)):
        found: list[torch.Tensor] = []
        for row in range(int(NUM_ROWS[request])):
            parent = int(PARENTS[request, row])
            flat = int(ROW_START[request]) + row
            found.append(update(before[blocks[tree]] if parent < 0 else found[parent], values[flat]))
            assert torch.equal(output[flat], found[row])
    assert torch.equal(layer.kv_cache[0][:9], before[:9])  # until the commit


def test_other_requests_run_beside_trees(layer, rows):
    values = torch.randn(int(LAST[-1]), 1, dtype=torch.float64)
    before = layer.kv_cache[0].clone()
    _, output = run(layer, rows, torch.tensor([3, 5]), values)
    for rows_of, start, place in ((range(6, 11), torch.zeros(1), 9), (range(15, 16), before[10], 10)):
        state = start.double()
        for row in rows_of:
            state = update(state, values[row])
            assert torch.equal(output[row], state)
        assert torch.equal(layer.kv_cache[0][place], state)


@pytest.mark.parametrize("block_size", [100, 4])
def test_commit_follows_the_accepted_path(layer, rows, block_size):
    """With small blocks, a state moves on to the next block and leaves the one at the block's end for other prompts."""
    values = torch.randn(int(LAST[-1]), 1, dtype=torch.float64)
    table = torch.tensor([[1, 2, 3, 4], [0] * 4, [5, 6, 7, 8], [0] * 4, [0] * 4])

    def block_of(requests, positions):
        return table[requests, positions // block_size]

    step, _ = run(layer, rows, block_of(rows.requests, rows.contexts), values)
    before = layer.kv_cache[0].clone()
    sources = torch.full((5, 3), -1)
    sources[0], sources[2, :2] = torch.tensor([0, 2, 5]), torch.tensor([11, 12])
    commit_states(step, sources, {"one": (layer, core)}, block_of)
    expected = before.clone()
    for request, path in ((0, [0, 2, 5]), (2, [11, 12])):
        context = int(CONTEXTS[request])
        state = before[table[request, context // block_size]]
        for depth, flat in enumerate(path):
            state = update(state, values[flat])
            expected[table[request, (context + depth) // block_size]] = state
    assert torch.equal(layer.kv_cache[0], expected)


def test_the_start_says_what_states_cost(caplog):
    """A request has one state, so nodes need no cap."""
    caplog.set_level("INFO")
    one = SimpleNamespace(get_state_shape=lambda: ((1 << 18,),), get_state_dtype=lambda: (torch.float32,))
    layers = object.__new__(StateLayers)
    layers.layers = {"first": one, "second": one}
    layers.build_by([], lambda: None)
    assert "states take 2.0 MiB per request in 2 layers, and up to 2.00 MiB more per tree row" in caplog.text
