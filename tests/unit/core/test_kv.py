"""The step's plan after a walk, and the moves of keys and values, against the oracle."""

import pytest
import torch

from tests.doubles import oracle
from tests.doubles.oracle_tensors import emitted, to_tree
from tests.doubles.reference_step import move_rows, walk_tokens
from vllm_specplug.core.kv import DraftScratch
from vllm_specplug.core.step import plan_step
from vllm_specplug.cpu.kernels import tree_ops
from vllm_specplug.types import PADDING


@pytest.fixture(scope="module")
def batch():
    """2000 walked trees whose verification forward also carries foreign rows between the trees."""
    rng = oracle.seeded(30)
    trees = [oracle.random_tree(rng, 15, 2) for _ in range(2000)]
    tree = to_tree(trees)
    active = torch.tensor([rng.random() < 0.9 for _ in trees])
    row_tokens = torch.tensor([[rng.randrange(2) for _ in range(tree.token_ids.shape[1])] for _ in trees])
    walk = walk_tokens(tree, row_tokens, active=active)
    starts, rows = [], 3
    for tree_rows in trees:
        starts.append(rows)
        rows += len(tree_rows) + rng.randrange(3)
    return trees, walk, torch.tensor(starts), rows


@pytest.fixture(params=[plan_step, tree_ops.plan_step])
def plan(request, batch):
    _, walk, row_start, num_rows = batch
    return request.param(walk, row_start.int(), num_rows)


@pytest.mark.parametrize("paged", [False, True])
def test_moves_equal_the_oracle_on_2000_walks(batch, plan, paged):
    trees, walk, row_start, num_rows = batch
    slots = torch.randperm(num_rows + 50, generator=torch.Generator().manual_seed(0))[:num_rows] if paged else None
    cache = torch.arange(num_rows + 50).unsqueeze(1).repeat(1, 2)
    if slots is not None:
        cache[slots] = torch.arange(num_rows).unsqueeze(1).repeat(1, 2)  # Each slot holds its flat row.
    assert move_rows(cache, plan, slots) is cache
    after = (cache if slots is None else cache[slots])[:num_rows, 0].tolist()
    previous_end = 0
    for request, (rows, start) in enumerate(zip(trees, row_start.tolist(), strict=True)):
        end = start + len(rows)
        _, path = emitted(walk, request)
        expected = oracle.commit(list(range(start, end)), 0, path)
        assert all(want in (None, got) for want, got in zip(expected, after[start:end], strict=True))
        assert after[previous_end:start] == list(range(previous_end, start))  # Foreign rows are untouched.
        previous_end = end


def test_accepted_rows_and_what_follows_from_them(batch, plan):
    _, walk, row_start, num_rows = batch
    path_index = list(range(num_rows))
    moved = 0
    for request, start in enumerate(row_start.tolist()):
        tokens, path = emitted(walk, request)
        path = path or [0]  # of a request that emits nothing the root alone is read
        behind = [PADDING] * (walk.path_rows.shape[1] - len(path))
        assert plan.source_rows[request].tolist() == [start + row for row in path] + behind
        assert plan.target_rows[request].tolist() == [start + depth for depth in range(len(path))] + behind
        assert plan.last_rows[request] == start + path[-1]
        for depth, row in enumerate(path):
            path_index[start + depth] = start + row
            moved += row != depth
    assert plan.path_index.tolist() == path_index
    assert moved > 500 and (plan.source_rows >= plan.target_rows).all()


def test_scratch_is_allocated_once_and_grows():
    scratch = DraftScratch({"a": (2, 4), "b": (1, 8)}, {"a": torch.float32, "b": torch.float32})
    rows = torch.tensor([3, 1])
    first = scratch.at(rows, 4)
    keys, values = first["a"].write(torch.ones(2, 2, 4), torch.full((2, 2, 4), 2.0))
    assert keys[rows].eq(1).all() and values[rows].eq(2).all()
    assert keys[[0, 2]].eq(0).all() and values[[0, 2]].eq(0).all()
    assert scratch.at(torch.tensor([0]), 4)["a"].key is first["a"].key
    assert scratch.at(rows, 6)["b"].key.shape == (6, 1, 8)
