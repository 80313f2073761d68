"""The operators of trees against the torch functions: equal to the bit, hard cases included."""

import math
from dataclasses import fields, is_dataclass

import pytest
import torch

from tests.doubles import oracle
from tests.doubles.oracle_tensors import to_tree
from tests.doubles.reference_step import walk_tokens
from vllm_specplug.core import layout, pruning, step, tree
from vllm_specplug.core.draft_sampling import Children
from vllm_specplug.core.growth import TORCH
from vllm_specplug.core.pool import DraftPool, new_pool
from vllm_specplug.core.tree import valid_rows
from vllm_specplug.cpu.kernels import tree_ops
from vllm_specplug.cpu.kernels.cpu_ops import operators
from vllm_specplug.cpu.kernels.tree_ops import OPERATORS
from vllm_specplug.proposers.eagle2.drafting import DraftFeatures, grow_tree
from vllm_specplug.types import Draft, TokenTree, Walk

pytestmark = pytest.mark.skipif(operators() is None, reason="the C++ operators cannot be built")

INF = math.inf
#: In eighths, so that sums are exact and ties abound.
LOG_PROBS = torch.tensor([0.0, 0.0, -0.125, -0.25, -0.5, -1.0, -3.0, 0.25, INF, -INF, -INF, math.nan])


def assert_same(ours, theirs):
    """Equal types, shapes and values, all the way down; NaN equals NaN."""
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    elif is_dataclass(ours):
        for field in fields(ours):
            assert_same(getattr(ours, field.name), getattr(theirs, field.name))
    elif isinstance(ours, tuple | list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    else:
        assert ours == theirs


def compare(reference, *args):
    """The operator with the name of ``reference`` gives the same."""
    ours = getattr(tree_ops, reference.__name__)(*args)
    assert_same(ours, reference(*args))
    return ours


def choose(generator, values, *shape):
    return values[torch.randint(0, len(values), shape, generator=generator)]


def random_pool(generator, num_reqs):
    """A pool of any shape, whose values need not fall along its paths."""
    width = int(torch.randint(1, 90, (), generator=generator))
    parents = (torch.rand(num_reqs, width, generator=generator) * (torch.arange(width) + 1)).long() - 1
    values = choose(generator, LOG_PROBS[(LOG_PROBS <= 0) | LOG_PROBS.isnan()], num_reqs, width)
    if torch.rand((), generator=generator) < 0.5:
        values = values - torch.rand(values.shape, generator=generator)
    tokens = torch.randint(0, 50, parents.shape, generator=generator)
    depths = torch.randint(1, 9, (1, width), generator=generator).expand(num_reqs, -1)
    return DraftPool(tokens, parents, values, depths, size=int(torch.randint(0, width + 1, (), generator=generator)))


@pytest.mark.parametrize("num_reqs", [1, 2, 33])
def test_rerank(num_reqs):
    generator, rng = torch.Generator().manual_seed(num_reqs), oracle.seeded(num_reqs)
    for _ in range(150):
        pool, num_nodes = random_pool(generator, num_reqs), rng.choice([0, 1, 5, 20, 100])
        roots = torch.randint(0, 50, (num_reqs,), generator=generator).to(rng.choice([torch.int32, torch.int64]))
        floor = rng.choice([0.0, 0.01, math.exp(-0.5), math.exp(-1), 1.0])
        compare(pruning.rerank_draft, pool, roots, num_nodes, floor)


def random_children(generator, num_reqs, top_k, levels, choices):
    """A drafter's children, level by level."""
    return [
        Children(torch.randint(0, 50, (rows, top_k), generator=generator), choose(generator, choices, rows, top_k))
        for rows in [num_reqs] + [num_reqs * top_k] * (levels - 1)
    ]


def compare_growths(generator, rng, num_reqs):
    """Compare whole growths: the trees and all arguments of ``forward`` and ``may_grow``; return the levels fed."""
    top_k, levels, dtype = rng.randint(1, 5), rng.randint(1, 4), rng.choice([torch.float32, torch.bfloat16])
    choices = rng.choice([LOG_PROBS, LOG_PROBS[:7], LOG_PROBS[-3:]]).to(dtype)
    children = random_children(generator, num_reqs, top_k, levels, choices)
    hidden = torch.rand(num_reqs, top_k, 3, generator=generator).to(dtype)
    options = {"num_nodes": rng.choice([1, 6, 200]), "draft_depth": levels, "draft_top_k": top_k}
    stop = rng.randint(1, 9)

    def draft(ops):
        calls = []

        def forward(level, token_ids, features, mask):
            calls.append((level, token_ids, features, mask))
            return DraftFeatures(hidden, features + hidden)

        def may_grow(values):
            calls.append(values)
            return len(calls) < stop

        def score(level, rows, top_k):
            return children[level]

        root = DraftFeatures(hidden[:, 0], hidden[:, 0])
        return grow_tree(torch.arange(num_reqs), root, score, forward, **options, may_grow=may_grow, ops=ops), calls

    ours = draft(OPERATORS)
    assert_same(ours, draft(TORCH))
    return len(ours[1]) // 2


@pytest.mark.parametrize("num_reqs", [1, 2, 33])
def test_growth(num_reqs):
    generator, rng = torch.Generator().manual_seed(num_reqs), oracle.seeded(num_reqs)
    assert {compare_growths(generator, rng, num_reqs) for _ in range(60)} == {0, 1, 2, 3}


@pytest.mark.parametrize("seed", range(60))
def test_levels_of_a_pool(seed):
    """The pool itself, and the beams of trees that hardly have a node."""
    generator, rng = torch.Generator().manual_seed(seed), oracle.seeded(seed)
    num_reqs, top_k, levels = rng.randint(1, 4), rng.randint(1, 5), rng.randint(1, 4)
    drafted = random_children(generator, num_reqs, top_k, levels, LOG_PROBS[5:])

    def grow(ops):
        pool, beams = new_pool(num_reqs, top_k, levels, "cpu"), [None]
        for children in drafted:
            beams.append(ops.grow_level(pool, beams[-1], children.token_ids, children.log_probs, 30))
            if beams[-1] is None:
                break
        return pool, beams

    assert_same(grow(OPERATORS), grow(TORCH))


def random_trees(rng, num_reqs):
    return to_tree([oracle.random_tree(rng, 20, 3) for _ in range(num_reqs)], width=rng.choice([21, 30]))


@pytest.mark.parametrize("num_reqs", [1, 2, 33])
def test_trees_as_rows(num_reqs):
    rng = oracle.seeded(num_reqs)
    for _ in range(100):
        trees, dtype = random_trees(rng, num_reqs), rng.choice([torch.int32, torch.int64])
        width = trees.parents.shape[1]
        num_rows = torch.tensor([rng.randint(-1, width + 1) for _ in range(num_reqs)], dtype=dtype)
        hostile = trees.parents.masked_fill(~valid_rows(num_rows, width), 99).to(dtype)
        hostile[:, 0] = 7
        flat = compare(tree.from_flat, trees.token_ids, hostile, num_rows)
        contexts = torch.tensor([rng.randint(0, 5000) for _ in range(num_reqs)], dtype=dtype)
        compare(layout.lay_out, flat, contexts)
        compare(layout.lay_out, trees, contexts, int(trees.depths.max()))


@pytest.mark.parametrize("num_reqs", [1, 2, 33])
def test_prune(num_reqs):
    generator, rng = torch.Generator().manual_seed(num_reqs), oracle.seeded(num_reqs)
    for _ in range(100):  # also nodes without their parents, whose result is unspecified but equal
        trees = random_trees(rng, num_reqs)
        keep = torch.rand(trees.parents.shape, generator=generator) < rng.choice([0.0, 0.5, 0.9])
        bits = torch.randint(0, 4, keep.shape, generator=generator) if rng.random() < 0.5 else None
        draft = Draft(trees, -torch.rand(keep.shape, generator=generator), ("a", "b") if bits is not None else (), bits)
        compare(pruning.prune, draft, keep)
        compare(pruning.prune, draft, keep[:, :1].expand_as(keep))


@pytest.mark.parametrize("num_reqs", [1, 2, 33])
def test_moves(num_reqs):
    rng = oracle.seeded(num_reqs)
    for _ in range(100):
        trees = random_trees(rng, num_reqs)
        tokens = torch.tensor([[rng.randrange(3) for _ in range(trees.parents.shape[1])] for _ in range(num_reqs)])
        walk = walk_tokens(trees, tokens, torch.tensor([rng.random() < 0.8 for _ in range(num_reqs)]))
        starts = torch.tensor([rng.randrange(99) for _ in range(num_reqs)], dtype=torch.int32)
        compare(step.plan_step, walk, starts, 200)


@pytest.mark.parametrize("parents", [[-1, 2, 0], [-1, 1, 0]])
def test_parents_below_their_children_are_refused(parents):
    parents, one = torch.tensor([parents]), torch.ones(1, dtype=torch.int64)
    hostile = TokenTree(torch.zeros_like(parents), parents, torch.zeros_like(parents), 3 * one)
    with pytest.raises(IndexError, match="it must be above"):
        tree_ops.lay_out(hostile, one)
    with pytest.raises(IndexError, match="it must be above"):
        tree_ops.prune(Draft(hostile, torch.zeros(1, 3)), torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(IndexError, match="it must be above"):
        tree_ops.from_flat(parents, parents, 3 * one)


def test_rows_beyond_the_forward_are_refused():
    path, two = torch.tensor([[0, 1]]), torch.tensor([2])
    with pytest.raises(IndexError, match="there is no row 10"):
        tree_ops.plan_step(Walk(path.int(), path, two), torch.tensor([9]), 10)


def test_a_full_pool_is_refused():
    pool = new_pool(1, 2, 1, "cpu")
    with pytest.raises(RuntimeError, match="the pool holds 2 nodes, 3 would be drafted"):
        OPERATORS.grow_level(pool, None, torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3), 5)
