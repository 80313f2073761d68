"""Times the stages of a step around the model, each against its slow pure-Python reference in the same run.

    python -m pytest -s benchmarks/micro/test_stages.py --benchmark-json=out.json

vLLM has no counterpart of these, since a chain needs none.  Read ``extra_info.reference_over_ours`` (median over
median, higher is better); what a stage costs a step is the benchmark's own median.  One thread: the tensors are tiny.
"""

import statistics
import time

import pytest
import torch

from tests.doubles import oracle
from tests.doubles.oracle_tensors import to_tree  # also sets one thread
from tests.doubles.reference_step import move_rows, walk_tokens
from vllm_specplug.core.pool import DraftPool
from vllm_specplug.cpu.kernels.tree_ops import from_flat, lay_out, plan_step, rerank_draft

ROUNDS, VOCAB, CONTEXT = 60, 64, 100

pytestmark = [
    pytest.mark.parametrize("num_reqs", [1, 8, 32]),
    pytest.mark.parametrize("num_nodes", [8, 32, 60]),
]


def compare(benchmark, ours, reference):
    """Run both in turns; write the reference's time to ``extra_info``."""
    seconds = []

    def timed_reference():
        start = time.perf_counter()
        reference()
        seconds.append(time.perf_counter() - start)

    benchmark.pedantic(ours, setup=timed_reference, rounds=ROUNDS, iterations=1, warmup_rounds=3)
    ratio = statistics.median(seconds) / benchmark.stats.stats.median
    benchmark.extra_info["reference_over_ours"] = ratio
    print(f"{benchmark.name}: {benchmark.stats.stats.median * 1e6:.0f} us, {ratio:.2f} times the reference's speed")


def make_trees(num_reqs, num_nodes):
    rng = oracle.seeded(num_nodes)
    rows = []
    for _ in range(num_reqs):
        tree = [(0, -1)]
        for row in range(1, num_nodes + 1):
            tree.append((rng.randrange(VOCAB), rng.randrange(max(0, row - 6), row)))
        rows.append(tree)
    return rows


def make_pool(num_reqs, num_nodes):
    """Make a filled pool of twice the nodes, whose values fall along its paths."""
    trees = make_trees(num_reqs, 2 * num_nodes)
    generator = torch.Generator().manual_seed(0)
    parents = torch.tensor([[parent - 1 for _, parent in rows[1:]] for rows in trees])
    values = -torch.rand(parents.shape, generator=generator)
    for node in range(values.shape[1]):
        above = values.gather(1, parents[:, node : node + 1].clamp(min=0)).squeeze(1)
        values[:, node] += torch.where(parents[:, node] >= 0, above, 0.0)
    depths = to_tree(trees).depths[:, 1:]
    token_ids = torch.tensor([[token for token, _ in rows[1:]] for rows in trees])
    pool = DraftPool(token_ids, parents, values, depths, size=values.shape[1])
    return pool, torch.zeros(num_reqs, dtype=torch.int64)


def test_rerank(benchmark, num_nodes, num_reqs):
    pool, roots = make_pool(num_reqs, num_nodes)
    rows = [list(zip(t, p, strict=True)) for t, p in zip(pool.token_ids.tolist(), pool.parents.tolist(), strict=True)]
    values = pool.log_values.tolist()

    def reference():
        return [
            oracle.as_rows(one, oracle.rerank(one, value, num_nodes), 0)
            for one, value in zip(rows, values, strict=True)
        ]

    compare(benchmark, lambda: rerank_draft(pool, roots, num_nodes), reference)


def test_build(benchmark, num_nodes, num_reqs):
    trees = make_trees(num_reqs, num_nodes)
    tree = to_tree(trees)

    def reference():
        return [[oracle.depth(rows, row) for row in range(len(rows))] for rows in trees]

    compare(benchmark, lambda: from_flat(tree.token_ids, tree.parents, tree.num_rows), reference)


def test_layout(benchmark, num_nodes, num_reqs):
    trees = make_trees(num_reqs, num_nodes)
    tree, context_lens = to_tree(trees), torch.full((num_reqs,), CONTEXT)
    max_depth = int(tree.depths.max())

    def reference():
        paths = [[set(oracle.path_to(rows, row)) for row in range(len(rows))] for rows in trees]
        return [[[column in path for column in range(len(request))] for path in request] for request in paths]

    compare(benchmark, lambda: lay_out(tree, context_lens, max_depth), reference)


def test_walk(benchmark, num_nodes, num_reqs):
    trees = make_trees(num_reqs, num_nodes)
    tree, rng = to_tree(trees), oracle.seeded(1)
    sampled = []
    for rows in trees:  # The target agrees with some child where there is one.
        children = {parent: token for token, parent in rows}
        sampled.append([children.get(row, rng.randrange(VOCAB)) for row in range(len(rows))])
    row_token_ids = torch.tensor(sampled)

    def reference():
        return [
            oracle.walk(rows, lambda row, _, tokens=tokens: tokens[row])
            for rows, tokens in zip(trees, sampled, strict=True)
        ]

    compare(benchmark, lambda: walk_tokens(tree, row_token_ids), reference)


def test_commit(benchmark, num_nodes, num_reqs):
    """Move one layer's keys of SmolLM2-135M; the reference copies row by row."""
    trees = make_trees(num_reqs, num_nodes)
    tree = to_tree(trees)
    tokens = torch.tensor([[dict((p, t) for t, p in rows).get(row, 0) for row in range(len(rows))] for rows in trees])
    walk = walk_tokens(tree, tokens)
    row_start = torch.arange(num_reqs) * (num_nodes + 1)
    cache = torch.randn(num_reqs * (num_nodes + 1), 3, 64)

    def reference():
        for request, (path, count) in enumerate(zip(walk.path_rows.tolist(), walk.num_emitted.tolist(), strict=True)):
            first = request * (num_nodes + 1)
            for depth in range(1, count):
                cache[first + depth] = cache[first + path[depth]]

    compare(benchmark, lambda: move_rows(cache, plan_step(walk, row_start, len(cache))), reference)
