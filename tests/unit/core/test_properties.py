"""What must hold for any tree (hypothesis)."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.doubles import oracle
from tests.doubles.oracle_tensors import emitted, to_rows, to_tree
from tests.doubles.reference_step import walk_tokens
from vllm_specplug.core.growth import deeper_nodes_can_enter, expand, next_beam
from vllm_specplug.core.layout import ancestor_bits, lay_out
from vllm_specplug.core.pool import new_pool
from vllm_specplug.core.pruning import rerank_draft
from vllm_specplug.core.step import plan_step
from vllm_specplug.core.tree import chain_tree, from_flat, valid_rows

quick = settings(max_examples=80, deadline=None, derandomize=True, database=None)


@st.composite
def trees(draw, max_rows=24, vocab_size=3):
    size = draw(st.integers(1, max_rows))
    tokens = draw(st.lists(st.integers(0, vocab_size - 1), min_size=size, max_size=size))
    parents = [-1] + [draw(st.integers(0, row - 1)) for row in range(1, size)]
    return list(zip(tokens, parents, strict=True))


batches = st.lists(trees(), min_size=1, max_size=4)


@quick
@given(batches, st.integers(0, 1000))
def test_masks_are_consistent(batch, context_len):
    tree = to_tree(batch)
    layout = lay_out(tree, torch.full((len(batch),), context_len))
    valid = valid_rows(tree.num_rows, tree.token_ids.shape[1])
    # A row sees itself, its ancestors (so many as its depth), nothing behind itself and no padding.
    assert torch.equal(layout.mask.diagonal(dim1=1, dim2=2), valid)
    assert torch.equal(layout.mask.sum(2), (tree.depths + 1) * valid)
    assert not layout.mask.triu(1).any()
    assert torch.equal(layout.positions, tree.depths + context_len)
    # Seeing is transitive: what an ancestor sees, the row sees.
    reach = layout.mask.double() @ layout.mask.double()
    assert torch.equal(reach > 0, layout.mask)
    word_bits = ancestor_bits(layout.mask).squeeze(2)
    assert word_bits.tolist() == [
        [sum(1 << column for column, seen in enumerate(row) if seen) for row in rows] for rows in layout.mask.tolist()
    ]


@quick
@given(batches, st.data())
def test_truncation_commutes_with_layout_and_shortens_walks(batch, data):
    tree = to_tree(batch)
    width = tree.token_ids.shape[1]
    cuts = torch.tensor(data.draw(st.lists(st.integers(0, width), min_size=len(batch), max_size=len(batch))))
    cut = from_flat(tree.token_ids, tree.parents, torch.minimum(tree.num_rows, cuts).clamp(min=1))
    whole, part = lay_out(tree, cuts), lay_out(cut, cuts)
    kept = valid_rows(cut.num_rows, width)
    assert torch.equal(part.mask, whole.mask & kept.unsqueeze(2))
    assert torch.equal(tree.depths * kept, cut.depths)
    row_tokens = torch.tensor([data.draw(st.lists(st.integers(0, 2), min_size=width, max_size=width))] * len(batch))
    long_walk, short_walk = walk_tokens(tree, row_tokens), walk_tokens(cut, row_tokens)
    for request in range(len(batch)):
        tokens, _ = emitted(long_walk, request)
        short_tokens, short_path = emitted(short_walk, request)
        assert short_tokens == tokens[: len(short_tokens)]
        assert max(short_path) < cut.num_rows[request]


@quick
@given(batches, st.data())
def test_walks_follow_edges_and_moves_lead_back(batch, data):
    tree = to_tree(batch)
    width = tree.token_ids.shape[1]
    row_tokens = torch.tensor([data.draw(st.lists(st.integers(0, 2), min_size=width, max_size=width)) for _ in batch])
    walk = walk_tokens(tree, row_tokens)
    for request, rows in enumerate(batch):
        tokens, path = emitted(walk, request)
        assert path[0] == 0
        for before, after, token in zip(path, path[1:], tokens, strict=False):
            assert rows[after] == (token, before)
        assert (tokens[-1], path[-1]) not in rows  # It stopped because no child matched.
    row_start = torch.arange(len(batch)) * width
    plan = plan_step(walk, row_start, len(batch) * width)
    moved = plan.source_rows != plan.target_rows
    sources, targets = plan.source_rows[moved], plan.target_rows[moved]
    assert (sources > targets).all()
    assert len(targets.unique()) == len(targets)
    assert torch.equal(sources // width, targets // width)  # Never across requests.
    assert len(set(targets.tolist()) & set(row_start.tolist())) == 0  # A root never moves.


@quick
@given(
    top_k=st.integers(1, 4),
    levels=st.integers(1, 4),
    num_nodes=st.integers(1, 40),
    num_reqs=st.integers(1, 3),
    seed=st.integers(0, 2**31),
    certain=st.floats(0, 0.9),
)
def test_reranked_trees_are_the_best_closed_sets(top_k, levels, num_nodes, num_reqs, seed, certain):
    """Real float32 log probs (rounding included), a share of them 0 so that children tie their parents."""
    generator = torch.Generator().manual_seed(seed)
    pool, beam = new_pool(num_reqs, top_k, levels, "cpu"), None
    for _ in range(levels):
        width = 1 if beam is None else beam.shape[1]
        log_probs = torch.randn(num_reqs, width, top_k, generator=generator).abs().neg() * 5
        log_probs[torch.rand(log_probs.shape, generator=generator) < certain] = 0.0
        log_probs[torch.rand(log_probs.shape, generator=generator) < 0.1] = float("nan")
        tokens = torch.randint(0, 100, log_probs.shape, generator=generator)
        expand(pool, beam, tokens, log_probs)
        beam = next_beam(pool, top_k)
        assert (beam[:, 1:] > beam[:, :-1]).all()
    tree = rerank_draft(pool, torch.zeros(num_reqs, dtype=torch.int64), num_nodes)[0].tree
    for request in range(num_reqs):
        nodes = list(zip(pool.token_ids[request].tolist(), pool.parents[request].tolist(), strict=True))
        values = [value if value > float("-inf") else None for value in pool.log_values[request].tolist()]
        taken = oracle.rerank(nodes, values, num_nodes)
        assert to_rows(tree, request) == oracle.as_rows(nodes, taken, 0)
        left = [value for node, value in enumerate(values) if value is not None and node not in taken]
        assert not left or len(taken) == num_nodes and max(left) <= min(values[node] for node in taken)


def test_no_stage_reads_data_back():
    """On the meta device tensors have no data: any host sync, or a size that depends on data, raises."""
    device, num_reqs, num_nodes, top_k, levels = "meta", 3, 8, 2, 3
    pool, beam = new_pool(num_reqs, top_k, levels, device), None
    for _ in range(levels):
        shape = (num_reqs, 1 if beam is None else top_k, top_k)
        expand(pool, beam, torch.zeros(shape, dtype=torch.int64, device=device), torch.zeros(shape, device=device))
        beam = next_beam(pool, top_k)
    numbers = torch.zeros(num_reqs, dtype=torch.int64, device=device)
    assert deeper_nodes_can_enter(pool, num_nodes).shape == (num_reqs,)
    tree = rerank_draft(pool, numbers, num_nodes)[0].tree
    row_tokens = torch.zeros(num_reqs, num_nodes + 1, dtype=torch.int64, device=device)
    trees = [tree, chain_tree(numbers, row_tokens[:, 1:], numbers), from_flat(row_tokens, row_tokens, numbers)]
    for tree in trees:
        layout = lay_out(tree, numbers, max_depth=levels)
        assert ancestor_bits(layout.mask).shape == (num_reqs, num_nodes + 1, 1)
        walk = walk_tokens(tree, row_tokens, static_depth=levels, max_emitted=levels + 1)
        assert walk.output_token_ids.shape == (num_reqs, levels + 1)
        plan = plan_step(walk, numbers, num_reqs * (num_nodes + 1))
        assert plan.source_rows.shape == plan.target_rows.shape == (num_reqs, levels + 1)
        assert plan.path_index.shape == (num_reqs * (num_nodes + 1),) and plan.last_rows.shape == (num_reqs,)
