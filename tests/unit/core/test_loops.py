"""The compiled loops against the torch operations: equal to the bit, hard cases included."""

import math
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch

from tests.doubles import oracle
from tests.doubles.oracle_tensors import to_tree
from tests.doubles.reference_step import walk_tokens
from vllm_specplug.core.draft_sampling import Children, likeliest
from vllm_specplug.core.growth import grow_level
from vllm_specplug.core.layout import lay_out
from vllm_specplug.core.loops import pool as pool_loops
from vllm_specplug.core.loops import rows as row_loops
from vllm_specplug.core.loops.arrays import is_cpu_without_autograd, torch_operations
from vllm_specplug.core.pool import DraftPool, new_pool
from vllm_specplug.core.pruning import prune, rerank_draft
from vllm_specplug.core.step import plan_step
from vllm_specplug.core.tree import depths_from_parents, from_flat, valid_rows
from vllm_specplug.proposers.eagle2.drafting import DraftFeatures, grow_tree
from vllm_specplug.types import Draft, TokenTree

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


def compare(loops, name, compute):
    """``compute`` in both forms: the same result, and it did come from the loop ``name``."""
    results, honest = [], getattr(loops, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, name, lambda *args: results.append(honest(*args)) or results[-1])
        ours = compute()
        used = len(results)
        with torch_operations():
            theirs = compute()
    assert 0 < used == len(results)
    assert name == "grow_level" or results[-1] is not None
    assert_same(ours, theirs)
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
        compare(pool_loops, "rerank", lambda p=pool, r=roots, n=num_nodes, f=floor: rerank_draft(p, r, n, f))


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

    def draft():
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
        return grow_tree(torch.arange(num_reqs), root, score, forward, **options, may_grow=may_grow), calls

    return len(compare(pool_loops, "grow_level", draft)[1]) // 2


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

    def grow():
        pool, beams = new_pool(num_reqs, top_k, levels, "cpu"), [None]
        for children in drafted:
            beams.append(grow_level(pool, beams[-1], children.token_ids, children.log_probs, 30))
            if beams[-1] is None:
                break
        return pool, beams

    compare(pool_loops, "grow_level", grow)


def random_trees(rng, num_reqs):
    return to_tree([oracle.random_tree(rng, 20, 3) for _ in range(num_reqs)], width=rng.choice([21, 30]))


@pytest.mark.parametrize("num_reqs", [1, 2, 33])
def test_trees_as_rows(num_reqs):
    rng = oracle.seeded(num_reqs)
    for _ in range(100):
        tree, dtype = random_trees(rng, num_reqs), rng.choice([torch.int32, torch.int64])
        num_rows = torch.tensor([rng.randint(-1, tree.parents.shape[1] + 1) for _ in range(num_reqs)], dtype=dtype)
        hostile = tree.parents.masked_fill(~valid_rows(num_rows, tree.parents.shape[1]), 99).to(dtype)
        hostile[:, 0] = 7
        flat = compare(row_loops, "from_flat", lambda t=tree, p=hostile, n=num_rows: from_flat(t.token_ids, p, n))
        compare(row_loops, "depths_from_parents", lambda t=flat: depths_from_parents(t.parents))
        contexts = torch.tensor([rng.randint(0, 5000) for _ in range(num_reqs)], dtype=dtype)
        compare(row_loops, "lay_out", lambda t=flat, c=contexts: lay_out(t, c))
        compare(row_loops, "lay_out", lambda t=tree, c=contexts: lay_out(t, c, int(t.depths.max())))


@pytest.mark.parametrize("num_reqs", [1, 2, 33])
def test_prune(num_reqs):
    generator, rng = torch.Generator().manual_seed(num_reqs), oracle.seeded(num_reqs)
    for _ in range(100):  # also nodes without their parents, whose result is unspecified but equal
        tree = random_trees(rng, num_reqs)
        keep = torch.rand(tree.parents.shape, generator=generator) < rng.choice([0.0, 0.5, 0.9])
        bits = torch.randint(0, 4, keep.shape, generator=generator) if rng.random() < 0.5 else None
        draft = Draft(tree, -torch.rand(keep.shape, generator=generator), ("a", "b") if bits is not None else (), bits)
        compare(row_loops, "prune", lambda d=draft, k=keep: prune(d, k))
        one = keep[:, :1].expand_as(keep)
        compare(row_loops, "prune", lambda d=draft, k=one: prune(d, k))


@pytest.mark.parametrize("num_reqs", [1, 2, 33])
def test_moves(num_reqs):
    rng = oracle.seeded(num_reqs)
    for _ in range(100):
        tree = random_trees(rng, num_reqs)
        tokens = torch.tensor([[rng.randrange(3) for _ in range(tree.parents.shape[1])] for _ in range(num_reqs)])
        walk = walk_tokens(tree, tokens, torch.tensor([rng.random() < 0.8 for _ in range(num_reqs)]))
        starts = torch.tensor([rng.randrange(99) for _ in range(num_reqs)], dtype=torch.int32)
        compare(row_loops, "plan_step", lambda w=walk, s=starts: plan_step(w, s, 200))


@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (5, 64), (2, 200), (33, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_likeliest(shape, dtype):
    generator, rng = torch.Generator().manual_seed(shape[1]), oracle.seeded(shape[1])
    for _ in range(20):
        # Logits that stay distinct in the dtype: of equal ones torch.topk takes any.
        width = min(shape[1], 1000 if dtype == torch.float32 else 100)
        logits = torch.stack([torch.randperm(width, generator=generator) for _ in range(shape[0])]).to(dtype) / 8
        count = min(rng.choice([1, 8, 20]), logits.shape[1])
        ids = torch.randperm(5000, generator=generator)[: logits.shape[1]] if rng.random() < 0.5 else None
        compare(pool_loops, "largest", lambda x=logits, k=count, d=ids: likeliest(x, k, d))


def test_largest_of_ties_and_nan():
    values = torch.tensor([[-INF, 1.0, 2.0, 2.0, math.nan, 1.0, math.nan], [-INF] * 7]).repeat(1, 40)
    best, indices = pool_loops.largest(values, 5)
    assert best[0].isnan().all() and indices[0].tolist() == [4, 6, 11, 13, 18]
    assert (best[1] == -INF).all() and indices[1].tolist() == [0, 1, 2, 3, 4]
    best, indices = pool_loops.largest(values[:, :4].repeat(1, 30), 3)
    assert best[0].tolist() == [2.0] * 3 and indices[0].tolist() == [2, 3, 6]


@pytest.mark.parametrize("parents", [[-1, 2, 0], [-1, 1, 0], [1, 0, 0]])
def test_parents_below_their_children_are_left_to_torch(parents):
    parents, one = torch.tensor([parents]), torch.ones(1, dtype=torch.int64)
    tree = TokenTree(torch.zeros_like(parents), parents, torch.zeros_like(parents), 3 * one)
    assert row_loops.lay_out(tree, one) is None
    assert row_loops.depths_from_parents(parents) is None
    assert row_loops.prune(Draft(tree, torch.zeros(1, 3)), torch.ones(1, 3, dtype=torch.bool)) is None
    assert parents[0, 0] > 0 or row_loops.from_flat(parents, parents, 3 * one) is None


def test_which_tensors_the_loops_take():
    tensor = torch.zeros(2)
    assert is_cpu_without_autograd(tensor, tensor)
    assert not is_cpu_without_autograd(tensor, tensor.to("meta"))
    assert not is_cpu_without_autograd(tensor.requires_grad_())
    with torch_operations():
        assert not is_cpu_without_autograd(torch.zeros(2))
    assert is_cpu_without_autograd(torch.zeros(2))


def test_traced_code_never_calls_the_loops(monkeypatch):
    tree, contexts = random_trees(oracle.seeded(0), 2), torch.tensor([5, 6])
    expected = lay_out(tree, contexts).mask
    monkeypatch.setattr(row_loops, "lay_out", None)
    traced = torch.compile(lambda tree, contexts: lay_out(tree, contexts).mask, backend="eager", fullgraph=True)
    assert torch.equal(traced(tree, contexts), expected)
    with pytest.raises(TypeError):
        lay_out(tree, contexts)


def test_nothing_is_left_to_compile():
    """In a new process: after the warm-up, growth, other trees and the rest of a step compile nothing."""
    code = """if True:
        import torch
        from vllm_specplug.utils.compiled import compiled
        from tests.unit.core import test_loops as tests
        from vllm_specplug.core.loops import pool, rows
        from vllm_specplug.core.loops.warm_up import compile_loops

        def signatures():
            functions = {**vars(pool), **vars(rows)}
            return {name: len(f.signatures) for name, f in functions.items() if isinstance(f, compiled)}

        compile_loops()
        before = signatures()
        assert len(before) > 10 and sum(map(bool, before.values())) > 5, before  # loaded ones call others that are not
        tests.test_growth(2)
        tests.test_rerank(2)
        tests.test_trees_as_rows(2)
        tests.test_prune(2)
        tests.test_moves(2)
        tests.test_likeliest((3, 63), torch.bfloat16)
        assert signatures() == before, signatures()
    """
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=True)
