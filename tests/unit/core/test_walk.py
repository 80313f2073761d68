"""The walk, against the oracle."""

import itertools

import pytest
import torch

from tests.doubles import oracle
from tests.doubles.oracle_tensors import emitted, to_tree
from tests.doubles.reference_step import walk_tokens
from vllm_specplug.core import walk as K
from vllm_specplug.core.tree import chain_tree


def samplers(row_tokens):
    """(oracle's choose for a request, sample for a batch) that look up a token per row."""

    def choose_for(request):
        return lambda row, tokens: row_tokens[request][row]

    return choose_for, torch.tensor(row_tokens)


@pytest.fixture(scope="module")
def batch():
    rng = oracle.seeded(20)
    trees = [oracle.random_tree(rng, 15, 3) for _ in range(2000)]
    width = max(map(len, trees))
    return trees, [[rng.randrange(3) for _ in range(width)] for _ in trees]


@pytest.mark.parametrize("max_emitted", [None, 1, 3])
@pytest.mark.parametrize("static", [False, True])
def test_walks_equal_the_oracle_on_2000_trees(batch, max_emitted, static):
    trees, row_tokens = batch
    choose_for, tokens = samplers(row_tokens)
    tree = to_tree(trees)
    depth = int(tree.depths.max()) if static else None
    walk = walk_tokens(tree, tokens, static_depth=depth, max_emitted=max_emitted)
    assert walk.output_token_ids.dtype == torch.int32
    assert walk.path_rows.shape == (2000, max_emitted or tree.token_ids.shape[1])
    lengths = set()
    for request, rows in enumerate(trees):
        expected = oracle.walk(rows, choose_for(request), max_emitted)
        assert emitted(walk, request) == expected
        lengths.add(len(expected[0]))
    assert lengths >= set(range(1, (max_emitted or 5) + 1))


def test_every_walk_over_every_small_tree():
    """All trees of up to 3 nodes over 2 tokens, under all assignments of a sampled token to each row."""
    trees = [
        [(0, -1), *zip(tokens, shape[1:], strict=True)]
        for size in range(4)
        for shape in oracle.all_shapes(size)
        for tokens in itertools.product(range(2), repeat=size)
    ]
    cases = [(rows, list(sampled)) for rows in trees for sampled in itertools.product(range(2), repeat=4)]
    choose_for, tokens = samplers([sampled for _, sampled in cases])
    walk = walk_tokens(to_tree([rows for rows, _ in cases]), tokens)
    assert len(cases) == 16 * (1 + 2 + 2 * 4 + 6 * 8)
    for request, (rows, _) in enumerate(cases):
        assert emitted(walk, request) == oracle.walk(rows, choose_for(request))


def test_any_history_dependent_sampler_gives_its_plain_tokens():
    """The token may depend on everything emitted so far; the walk then yields a prefix of plain decoding."""
    rng = oracle.seeded(21)
    trees = [oracle.random_tree(rng, 15, 2) for _ in range(500)]

    def plain(request, history):
        return oracle.seeded(hash((request, *history))).randrange(2)

    histories = [[] for _ in trees]

    def sample(rows, active, depth):
        for request, is_active in enumerate(active.tolist()):
            if is_active:
                assert len(histories[request]) == depth
                histories[request].append(plain(request, histories[request]))
        return torch.tensor([history[-1] if history else -1 for history in histories])

    walk = K.walk_exact(to_tree(trees), sample)
    for request, rows in enumerate(trees):
        tokens, path = emitted(walk, request)
        assert (tokens, path) == oracle.walk(rows, lambda row, done, request=request: plain(request, done))
        assert tokens == histories[request]  # One draw per emitted token: none in vain, none after the stop.
    assert max(map(len, histories)) >= 5


def test_excluded_requests_emit_nothing_and_never_draw():
    rng = oracle.seeded(22)
    trees = [oracle.random_tree(rng, 8, 2) for _ in range(100)]
    tree, active = to_tree(trees), torch.arange(100) % 3 > 0
    tokens = torch.randint(0, 2, tree.token_ids.shape, generator=torch.Generator().manual_seed(0))
    draws = torch.zeros(100, dtype=torch.int64)

    def sample(rows, active, depth):
        nonlocal draws
        draws = draws + active
        return tokens.gather(1, rows.unsqueeze(1)).squeeze(1)

    walk, everyone = K.walk_exact(tree, sample, active=active), walk_tokens(tree, tokens)
    assert torch.equal(walk.num_emitted, draws)
    assert torch.equal(walk.num_emitted, everyone.num_emitted * active)
    for request in range(100):
        assert emitted(walk, request) == (emitted(everyone, request) if active[request] else ([], []))
    assert (walk.path_rows[:, 0] == 0).all()


def test_the_loop_ends_with_the_last_active_request():
    tree = chain_tree(torch.tensor([0]), torch.arange(1, 31).unsqueeze(0), torch.tensor([30]))
    rounds = []

    def sample(rows, active, depth):
        rounds.append((rows.tolist(), active.tolist(), depth))
        return torch.tensor([1 if depth == 0 else 99])

    K.walk_exact(tree, sample)
    assert rounds == [([0], [True], 0), ([1], [True], 1)]
    rounds.clear()
    K.walk_exact(tree, sample, static_depth=4)  # A fixed number of rounds; stopped rows stay valid.
    assert rounds[2:] == [([1], [False], depth) for depth in (2, 3, 4)]
    rounds.clear()
    assert K.walk_exact(tree, sample, active=torch.tensor([False])).num_emitted.tolist() == [0]
    assert rounds == []


def test_the_walk_stepwise():
    tree = to_tree([[(5, -1), (6, 0), (7, 0), (8, 2)]])
    state = K.start(tree)
    state = K.advance(state, torch.tensor([7], dtype=torch.int32))
    assert K.current_rows(state).tolist() == [2] and state.active.tolist() == [True]
    state = K.advance(state, torch.tensor([6]))  # 6 is a child of the root only.
    assert K.current_rows(state).tolist() == [2] and state.active.tolist() == [False]
    state = K.advance(state, torch.tensor([8]))  # A stopped request stays where it is.
    assert K.current_rows(state).tolist() == [2]
    assert emitted(K.finish(state), 0) == ([7, 6], [0, 2])


def test_the_first_of_equal_siblings_is_taken():
    tree = to_tree([[(5, -1), (6, 0), (6, 0), (7, 2), (8, 1)]])
    assert emitted(walk_tokens(tree, torch.tensor([[6, 7, 7, 0, 0]])), 0) == ([6, 7], [0, 1])


def test_placeholder_drafts_match_nothing():
    tree = chain_tree(torch.tensor([3]), torch.tensor([[-1, -1]]), torch.tensor([2]))
    assert emitted(walk_tokens(tree, torch.full((1, 3), -1)), 0)[1] == [0]
    assert emitted(walk_tokens(tree, torch.tensor([[4, 4, 4]])), 0) == ([4], [0])


def test_max_emitted_must_be_positive():
    with pytest.raises(ValueError, match="at least one token, max_emitted is 0"):
        K.start(chain_tree(torch.tensor([3]), torch.tensor([[1]]), torch.tensor([1])), 0)


def test_settled_tokens_are_emitted_by_the_rows_of_their_path():
    """Also a last token that no node has; a walk over them follows the path, and what is sampled behind it."""
    tree = to_tree([[(5, -1), (6, 0), (7, 0), (8, 2), (9, 3)], [(5, -1), (6, 0), (6, 1)], [(4, -1)]])
    settled = K.settled_rows(tree, torch.tensor([[7, 8, 3], [6, -1, -1], [-1, -1, -1]]))
    assert settled.tolist() == [[7, -1, 8, 3, -1], [6, -1, -1, -1, -1], [-1] * 5]
    sampled = torch.tensor([[1, 1, 1, 9, 1], [2, 6, 3, 0, 0], [1, 0, 0, 0, 0]])
    walk = walk_tokens(tree, torch.where(settled >= 0, settled, sampled))
    assert [emitted(walk, request)[0] for request in range(3)] == [[7, 8, 3], [6, 6, 3], [1]]


def test_nothing_is_settled():
    tree = chain_tree(torch.tensor([3]), torch.tensor([[1, 2]]), torch.tensor([2]))
    assert K.settled_rows(tree, torch.empty(1, 0, dtype=torch.int64)).tolist() == [[-1, -1, -1]]
