"""KV moves and the re-seed plan, against the oracle."""

import pytest
import torch

from tests.doubles import oracle
from tests.doubles.oracle_tensors import emitted, to_tree
from vllm_specplug.core.kv import DraftScratch, apply_moves, plan_moves
from vllm_specplug.core.seed import plan_reseed
from vllm_specplug.core.walk import walk_tokens
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


@pytest.mark.parametrize("compact", [True, False, None])
@pytest.mark.parametrize("paged", [False, True])
def test_moves_equal_the_oracle_on_2000_walks(batch, compact, paged):
    trees, walk, row_start, num_rows = batch
    moves = plan_moves(walk, row_start, compact)
    slots = torch.randperm(num_rows + 50, generator=torch.Generator().manual_seed(0))[:num_rows] if paged else None
    cache = torch.arange(num_rows + 50).unsqueeze(1).repeat(1, 2)
    if slots is not None:
        cache[slots] = torch.arange(num_rows).unsqueeze(1).repeat(1, 2)  # Each slot holds its flat row.
    assert apply_moves(cache, moves, slots) is cache
    after = (cache if slots is None else cache[slots])[:num_rows, 0].tolist()
    previous_end = 0
    for request, (rows, start) in enumerate(zip(trees, row_start.tolist(), strict=True)):
        end = start + len(rows)
        _, path = emitted(walk, request)
        expected = oracle.commit(list(range(start, end)), 0, path)
        assert all(want in (None, got) for want, got in zip(expected, after[start:end], strict=True))
        assert after[previous_end:start] == list(range(previous_end, start))  # Foreign rows are untouched.
        previous_end = end


def test_moves_are_the_displaced_nodes_only(batch):
    trees, walk, row_start, _ = batch
    moves = plan_moves(walk, row_start, compact=True)
    expected = []
    for request, start in enumerate(row_start.tolist()):
        _, path = emitted(walk, request)
        expected += [(start + row, start + depth) for depth, row in enumerate(path) if row != depth]
    assert list(zip(moves.source_rows.tolist(), moves.target_rows.tolist(), strict=True)) == expected
    assert len(expected) > 500
    assert (moves.source_rows > moves.target_rows).all()


def test_moves_may_chain_through_a_row():
    """Path 0 -> 2 -> 4: row 4 goes to slot 2, which is itself a source; all sources are read first."""
    walk = walk_tokens(to_tree([[(0, -1), (1, 0), (2, 0), (3, 1), (4, 2)]]), torch.tensor([[2, 0, 4, 0, 9]]))
    cache = torch.tensor([10.0, 11.0, 12.0, 13.0, 14.0])
    assert apply_moves(cache, plan_moves(walk, torch.tensor([0]))).tolist()[:3] == [10.0, 12.0, 14.0]


def test_fixed_width_moves_keep_their_shape(batch):
    _, walk, row_start, _ = batch
    assert plan_moves(walk, row_start, compact=False).source_rows.shape == (walk.path_rows.numel(),)


def test_reseed_plan_on_2000_walks(batch):
    _, walk, row_start, num_rows = batch
    plan, width = plan_reseed(walk, row_start.int()), walk.path_rows.shape[1]
    assert (plan.source_rows >= 0).all() and (plan.source_rows < num_rows).all()
    assert torch.equal(plan.lens, walk.num_emitted)
    for request, start in enumerate(row_start.tolist()):
        tokens, path = emitted(walk, request)
        behind = width - len(tokens)
        assert plan.source_rows[request].tolist() == [start + row for row in path] + [start] * behind
        assert plan.target_rows[request].tolist() == [start + d for d in range(len(tokens))] + [PADDING] * behind
        assert plan.token_ids[request].tolist() == tokens + [PADDING] * behind
        assert plan.next_token_ids[request] == (tokens[-1] if tokens else PADDING)


def test_scratch_is_allocated_once_and_grows():
    scratch = DraftScratch({"a": (2, 4), "b": (1, 8)}, torch.float32)
    rows = torch.tensor([3, 1])
    first = scratch.at(rows, 4)
    written, _ = first["a"].write(torch.ones(2, 2, 4), torch.zeros(2, 2, 4))
    assert written[rows].eq(1).all() and written[[0, 2]].eq(0).all()
    assert scratch.at(torch.tensor([0]), 4)["a"].key is first["a"].key
    assert scratch.at(rows, 6)["b"].key.shape == (6, 1, 8)
