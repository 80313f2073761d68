"""Growing, reranking and building trees, against the oracle."""

import math

import pytest
import torch

from tests.doubles import oracle
from tests.doubles.oracle_tensors import to_rows, to_tree
from vllm_specplug.core.growth import deeper_nodes_can_enter, expand, next_beam
from vllm_specplug.core.pool import DraftPool, new_pool
from vllm_specplug.core.pruning import rerank_draft
from vllm_specplug.core.tree import (
    chain_tree,
    depths_from_parents,
    from_flat,
    static_tree,
    validate_parents,
)

INF = math.inf


def rerank(*args, **options):
    return rerank_draft(*args, **options)[0].tree


def grow(rng, top_k, levels, num_reqs=1, edge_cases=True):
    """Grow pools with log probs in eighths, so that sums are exact and ties abound; returns (pool, oracle pools).

    An oracle pool is a pair of lists: (token, parent) and values (None for a node that does not exist).
    """
    pool = new_pool(num_reqs, top_k, levels, "cpu")
    mirrors = [([], []) for _ in range(num_reqs)]
    choices = [0.0, 0.0, -0.125, -0.25, -0.5, -1.0, -3.0] + ([-INF, math.nan] if edge_cases else [])
    beam = None
    for _ in range(levels):
        width = 1 if beam is None else beam.shape[1]
        token_ids = [[[rng.randrange(50) for _ in range(top_k)] for _ in range(width)] for _ in range(num_reqs)]
        log_probs = [[[rng.choice(choices) for _ in range(top_k)] for _ in range(width)] for _ in range(num_reqs)]
        for request, (nodes, values) in enumerate(mirrors):
            for fed in range(width):
                parent = -1 if beam is None else int(beam[request, fed])
                above = 0.0 if parent < 0 else values[parent]
                for token, log_prob in zip(token_ids[request][fed], log_probs[request][fed], strict=True):
                    exists = above is not None and math.isfinite(log_prob)
                    nodes.append((token, parent))
                    values.append(above + log_prob if exists else None)
        assert expand(pool, beam, torch.tensor(token_ids), torch.tensor(log_probs)) is pool
        beam = next_beam(pool, top_k)
    return pool, mirrors


def test_a_full_pool_refuses_another_level():
    pool, _ = grow(oracle.seeded(0), top_k=2, levels=2)
    with pytest.raises(ValueError, match="the pool holds 6 nodes, 10 would"):
        expand(pool, next_beam(pool, 2), torch.zeros(1, 2, 2, dtype=torch.int64), torch.zeros(1, 2, 2))


def test_expand_accumulates_in_float32():
    pool = new_pool(1, 1, 2, "cpu")
    tokens = torch.zeros(1, 1, 1, dtype=torch.int64)
    expand(pool, None, tokens, torch.full((1, 1, 1), -256.0, dtype=torch.bfloat16))
    expand(pool, next_beam(pool, 1), tokens, torch.full((1, 1, 1), -0.5, dtype=torch.bfloat16))
    assert pool.log_values.tolist() == [[-256.0, -256.5]]  # bfloat16 would give -256 twice.


def test_grown_pools_equal_the_oracle():
    rng = oracle.seeded(1)
    for _ in range(40):
        pool, mirrors = grow(rng, rng.randint(1, 4), rng.randint(1, 4), num_reqs=3)
        for request, (nodes, values) in enumerate(mirrors):
            drafted = zip(pool.token_ids[request].tolist(), pool.parents[request].tolist(), strict=True)
            assert list(drafted) == nodes
            assert pool.log_values[request].tolist() == [-INF if value is None else value for value in values]


def test_next_beam_takes_the_best_of_the_newest_level_with_stable_ties():
    rng = oracle.seeded(2)
    for _ in range(100):
        top_k = rng.randint(1, 5)
        pool, mirrors = grow(rng, top_k, rng.randint(1, 3), num_reqs=2)
        beam = next_beam(pool, top_k)
        for request, (_, values) in enumerate(mirrors):
            newest = range(pool.level_start, pool.size)
            best = sorted(newest, key=lambda node: (-INF if values[node] is None else values[node], -node))[::-1]
            assert beam[request].tolist() == sorted(best[:top_k])


def test_rerank_equals_the_oracle_on_2000_pools():
    rng = oracle.seeded(3)
    checked = ties = short = 0
    while checked < 2000:
        num_reqs, num_nodes = 20, rng.randint(1, 30)
        pool, mirrors = grow(rng, rng.randint(1, 4), rng.randint(1, 4), num_reqs=num_reqs)
        roots = torch.tensor([rng.randrange(50) for _ in range(num_reqs)])
        tree = rerank(pool, roots, num_nodes)
        assert tree.token_ids.shape == (num_reqs, num_nodes + 1)
        for request, (nodes, values) in enumerate(mirrors):
            taken = oracle.rerank(nodes, values, num_nodes)
            expected = oracle.as_rows(nodes, taken, int(roots[request]))
            assert to_rows(tree, request) == expected
            depths = [oracle.depth(expected, row) for row in range(len(expected))]
            assert tree.depths[request, : len(depths)].tolist() == depths
            ties += any(parent >= 0 and values[node] == values[parent] for node, (_, parent) in enumerate(nodes))
            short += len(expected) < num_nodes + 1
        checked += num_reqs
    assert ties > 500 and short > 200  # The hard cases did occur.


def test_rerank_with_a_floor_equals_the_oracle_without_the_nodes_below():
    rng = oracle.seeded(6)
    cut = 0
    for _ in range(100):
        num_nodes, floor = rng.randint(1, 30), rng.choice([1e-4, 0.01, 0.1, 0.4])
        pool, mirrors = grow(rng, rng.randint(1, 4), rng.randint(1, 4), num_reqs=4)
        tree = rerank(pool, torch.tensor([7] * 4), num_nodes, min_node_value=floor)
        for request, (nodes, values) in enumerate(mirrors):
            kept = [None if value is None or value < math.log(floor) else value for value in values]
            cut += kept != values
            assert to_rows(tree, request) == oracle.as_rows(nodes, oracle.rerank(nodes, kept, num_nodes), 7)
    assert cut > 100


def test_rerank_keeps_a_tied_child_with_its_parent():
    """EAGLE's reference picks by torch.topk and may keep a certain child without its parent."""
    pool = new_pool(1, 8, 6, "cpu")
    tokens = torch.arange(8).repeat(1, 8, 1)
    certain = torch.full((1, 8, 8), -30.0)
    certain[:, :, 0] = 0.0
    expand(pool, None, tokens[:, :1], torch.full((1, 1, 8), -2.0))
    for _ in range(5):
        expand(pool, next_beam(pool, 8), tokens, certain)
    for num_nodes in range(1, 49):  # 48 nodes tie.
        tree = rerank(pool, torch.tensor([9]), num_nodes)
        rows = to_rows(tree, 0)
        assert len(rows) == num_nodes + 1
        assert all(parent < row for row, (_, parent) in enumerate(rows))
        assert tree.depths[0, 1:].sort().values.tolist() == tree.depths[0, 1:].tolist()
        assert tree.depths[0].tolist() == [oracle.depth(rows, row) for row in range(len(rows))]
        assert tree.depths[0, -1] == -(-num_nodes // 8)  # Ties go to the shallower node.


def test_deeper_nodes_can_enter_exactly_when_a_certain_child_would():
    rng = oracle.seeded(4)
    seen = set()
    for _ in range(150):
        top_k, num_nodes = rng.randint(1, 4), rng.randint(1, 25)
        pool, mirrors = grow(rng, top_k, rng.randint(1, 3), num_reqs=4, edge_cases=rng.random() < 0.5)
        can_enter = deeper_nodes_can_enter(pool, num_nodes).tolist()
        for (nodes, values), answer in zip(mirrors, can_enter, strict=True):
            newest = [node for node in range(pool.level_start, pool.size) if values[node] is not None]
            entered = False
            if newest:
                parent = max(newest, key=lambda node: (values[node], -node))
                taken = oracle.rerank([*nodes, (0, parent)], [*values, values[parent]], num_nodes)
                entered = len(nodes) in taken
            assert answer == entered
            seen.add(answer)
    assert seen == {True, False}


def test_stopping_when_no_deeper_node_can_enter_changes_nothing():
    rng = oracle.seeded(5)
    stops = 0
    for _ in range(200):
        pool, _ = grow(rng, 3, 4)
        num_nodes = rng.randint(1, 12)
        full = rerank(pool, torch.tensor([1]), num_nodes)
        early = DraftPool(pool.token_ids, pool.parents, pool.log_values, pool.depths)
        for level, size in enumerate([3, 12, 21, 30], start=1):
            early.level_start, early.size, early.num_levels = early.size, size, level
            if not deeper_nodes_can_enter(early, num_nodes).any():
                break
        stops += early.size < 30
        assert torch.equal(rerank(early, torch.tensor([1]), num_nodes).token_ids, full.token_ids)
        assert torch.equal(rerank(early, torch.tensor([1]), num_nodes).parents, full.parents)
    assert stops > 20


def test_chain_tree():
    tree = chain_tree(torch.tensor([1, 2]), torch.tensor([[3, -1, 5], [6, 7, 8]]), torch.tensor([3, 1]))
    assert to_rows(tree, 0) == [(1, -1), (3, 0), (-1, 1), (5, 2)]  # A placeholder draft stays a node.
    assert to_rows(tree, 1) == [(2, -1), (6, 0)]
    assert tree.depths.tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]


def test_static_tree():
    tree = static_tree(torch.tensor([1, 2]), torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]]), (0, 0, 1, 3))
    assert to_rows(tree, 0) == [(1, -1), (3, 0), (4, 0), (5, 1), (6, 3)]
    assert to_rows(tree, 1) == [(2, -1), (7, 0), (8, 0), (9, 1), (10, 3)]
    assert tree.depths.tolist() == [[0, 1, 1, 2, 3]] * 2
    with pytest.raises(ValueError, match="4 nodes, 3 tokens"):
        static_tree(torch.tensor([1]), torch.tensor([[3, 4, 5]]), (0, 0, 1, 3))


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ((0, 2), r"node 1 \(row 2\) is row 2; it must be a row above its own, from 0 \(the root\) to 1"),
        ((-1, 0), "node 0 .* is row -1"),
        ((0, 1.0), "must be an int, not 1.0"),
        ((0, True), "must be an int, not True"),
    ],
)
def test_validate_parents_says_what_is_wrong(parents, message):
    with pytest.raises(ValueError, match=message):
        validate_parents(parents)


def test_flat_depths_and_prefixes_equal_the_oracle_on_2000_trees():
    rng = oracle.seeded(6)
    trees = [oracle.random_tree(rng, 20, 9) for _ in range(2000)]
    tree = to_tree(trees)
    cuts = [rng.randint(1, 22) for _ in trees]
    cut = from_flat(tree.token_ids, tree.parents, torch.minimum(tree.num_rows, torch.tensor(cuts)))
    for request, rows in enumerate(trees):
        assert to_rows(tree, request) == rows
        assert tree.depths[request, : len(rows)].tolist() == [oracle.depth(rows, row) for row in range(len(rows))]
        assert to_rows(cut, request) == rows[: cuts[request]]
    assert torch.equal(cut.depths, depths_from_parents(cut.parents))
