"""The walk's output is distributed as plain sampling from the target.

A target over a tiny vocabulary conditions on everything since the root; many requests walk a tree with independent
draws, continue by plain sampling after the stop, and the joint distribution of their first tokens is compared with
the product of the target's conditionals by a chi-square test.  Planted errors show that the test would notice.
All seeds are fixed, so a result never varies from run to run.
"""

import itertools

import pytest
import torch
from scipy.stats import chisquare

from tests.doubles import oracle
from tests.doubles.oracle_tensors import to_tree
from vllm_specplug.core.tree import TokenTree
from vllm_specplug.core.walk import advance, current_rows, finish, start, walk_exact

LENGTH = 3
WALKS = 10_000
SMALLEST_P = 1e-4


class TabularTarget:
    """Random conditional distributions of the next token given all tokens since the root (up to ``LENGTH`` - 1).

    ``tables[d]`` is float64 ``[vocab_size ** d, vocab_size]``, indexed by the history read as a number.
    """

    def __init__(self, vocab_size, seed):
        self.vocab_size = vocab_size
        self.generator = torch.Generator().manual_seed(seed)
        self.tables = [
            (2 * torch.randn(vocab_size**length, vocab_size, generator=self.generator, dtype=torch.float64)).softmax(1)
            for length in range(LENGTH)
        ]

    def index(self, tokens):
        """Number of each history, ``tokens`` int ``[n, length]``; -1 marks the end of shorter ones."""
        number = torch.zeros(len(tokens), dtype=torch.int64)
        for column in tokens.T:
            number = torch.where(column >= 0, number * self.vocab_size + column, number)
        return number

    def draw(self, history):
        """One token per row of ``history`` int64 ``[n, length]``."""
        probs = self.tables[history.shape[1]][self.index(history)]
        return torch.multinomial(probs, 1, generator=self.generator).squeeze(1)

    def row_probs(self, rows):
        """Float64 ``[num_rows, vocab_size]``: the target's logits of a tree, deeper rows uniform."""
        probs = torch.full((len(rows), self.vocab_size), 1 / self.vocab_size, dtype=torch.float64)
        for row in range(len(rows)):
            history = [rows[node][0] for node in oracle.path_to(rows, row)[1:]]
            if len(history) < LENGTH:
                index = self.index(torch.tensor([history], dtype=torch.int64).view(1, -1))
                probs[row] = self.tables[len(history)][index[0]]
        return probs

    def exact(self):
        """Probability of every sequence of ``LENGTH`` tokens, float64 ``[vocab_size ** LENGTH]``."""
        joint = torch.ones(1, dtype=torch.float64)
        for table in self.tables:
            joint = (joint.unsqueeze(1) * table).flatten()
        return joint


def batch_of(rows, count=WALKS):
    one = to_tree([rows])
    return TokenTree(*(getattr(one, name).repeat_interleave(count, 0) for name in one.__dataclass_fields__))


def row_sampler(target, rows):
    """Plain sampling from the current rows; a token no vocabulary holds for stopped requests, which must not matter."""
    probs = target.row_probs(rows)

    def sample(current, active, depth):
        drawn = torch.multinomial(probs[current], 1, generator=target.generator).squeeze(1)
        return torch.where(active, drawn, -7)

    return sample


def continue_plainly(target, walk):
    """First ``LENGTH`` tokens of each request, the missing ones drawn by plain decoding."""
    emitted = walk.output_token_ids[:, :LENGTH].long()
    emitted = torch.nn.functional.pad(emitted, (0, LENGTH - emitted.shape[1]), value=-1)
    for length in range(LENGTH):
        missing = walk.num_emitted <= length
        if missing.any():
            emitted[missing, length] = target.draw(emitted[missing, :length])
    return emitted


def p_value(target, tokens):
    """Chi-square of the joint tokens; cells that expect fewer than 5 are pooled."""
    expected = target.exact() * len(tokens)
    counts = torch.bincount(target.index(tokens), minlength=len(expected)).double()
    rare = expected < 5
    pool = [(counts[rare].sum(), expected[rare].sum())] if rare.any() else []
    cells = [*zip(counts[~rare], expected[~rare], strict=True), *pool]
    observed, wanted = (torch.stack([torch.as_tensor(cell[i]) for cell in cells]).numpy() for i in (0, 1))
    return chisquare(observed, wanted).pvalue


def small_trees(vocab_size, seed):
    """Every shape of up to 4 nodes, with random distinct siblings."""
    rng = oracle.seeded(seed)
    for size in range(5):
        for parents in oracle.all_shapes(size):
            rows = [(0, -1)]
            for parent in parents[1:]:
                free = set(range(vocab_size)) - {token for token, sibling_of in rows if sibling_of == parent}
                rows.append((rng.choice(sorted(free)), parent))
            yield rows


def test_every_small_shape_samples_the_target_exactly():
    p_values, longest = [], 0
    for seed, rows in enumerate(small_trees(4, seed=40)):
        target = TabularTarget(4, seed)
        walk = walk_exact(batch_of(rows), row_sampler(target, rows))
        longest = max(longest, int(walk.num_emitted.max()))
        p_values.append(p_value(target, continue_plainly(target, walk)))
    assert len(p_values) == 1 + 1 + 2 + 6 + 24 and longest == 5
    assert min(p_values) > SMALLEST_P
    assert 0.2 < sum(p_values) / len(p_values) < 0.8  # Neither too bad nor too good to be true.


@pytest.mark.parametrize("vocab_size", [4, 5, 6])
def test_larger_trees_sample_the_target_exactly(vocab_size):
    rng = oracle.seeded(41)
    for seed in range(6):
        target = TabularTarget(vocab_size, 100 + seed)
        rows = oracle.random_tree(rng, 20, vocab_size)  # Equal siblings included.
        walk = walk_exact(batch_of(rows), row_sampler(target, rows))
        assert p_value(target, continue_plainly(target, walk)) > SMALLEST_P


#: Two levels of two children, and a third level: room for every error below.
BUSHY = [(0, -1), (1, 0), (2, 0), (0, 1), (3, 1), (1, 2), (2, 3)]


def accept_unsampled(target, rows):
    """Take the root's first child without sampling, in one request out of four."""
    state = start(batch_of(rows))
    sample = row_sampler(target, rows)
    for depth in range(LENGTH):
        drawn = sample(current_rows(state), state.active, depth)
        if depth == 0:
            drawn[: WALKS // 4] = rows[1][0]
        state = advance(state, drawn)
    return finish(state)


def sample_the_wrong_row(target, rows):
    """Sample at flat row ``depth``, as chain code would, instead of at the path's row."""
    sample = row_sampler(target, rows)
    return walk_exact(batch_of(rows), lambda row, active, depth: sample(torch.full_like(row, depth), active, depth))


def draw_twice(target, rows):
    """Retry once where the first draw is not a child: more acceptance, another distribution."""
    sample = row_sampler(target, rows)
    children = torch.zeros(len(rows), target.vocab_size, dtype=torch.bool)
    for token, parent in rows[1:]:
        children[parent, token] = True

    def eager(row, active, depth):
        first, second = sample(row, active, depth), sample(row, active, depth)
        return torch.where(children[row, first.clamp(min=0)], first, second)

    return walk_exact(batch_of(rows), eager)


def forget_the_bonus_distribution(target, rows):
    """On a stop, draw the bonus again from the tokens that no child has: the multi-candidate residual, misused."""
    probs = target.row_probs(rows)
    residual = probs.clone()
    for token, parent in rows[1:]:
        residual[parent, token] *= 0.5
    residual /= residual.sum(1, keepdim=True)
    sample = row_sampler(target, rows)

    def biased(row, active, depth):
        drawn = sample(row, active, depth)
        child = (torch.tensor([p for _, p in rows]) == row[:, None]) & (
            torch.tensor([t for t, _ in rows]) == drawn[:, None]
        )
        again = torch.multinomial(residual[row], 1, generator=target.generator).squeeze(1)
        return torch.where(child.any(1), drawn, again)

    return walk_exact(batch_of(rows), biased)


@pytest.mark.parametrize("planted", [accept_unsampled, sample_the_wrong_row, draw_twice, forget_the_bonus_distribution])
def test_a_planted_bias_is_caught(planted):
    for seed in range(3):
        target = TabularTarget(4, 200 + seed)
        honest = walk_exact(batch_of(BUSHY), row_sampler(target, BUSHY))
        assert p_value(target, continue_plainly(target, honest)) > SMALLEST_P
        assert p_value(target, continue_plainly(target, planted(target, BUSHY))) < SMALLEST_P


def test_the_tree_sampler_agrees_with_enumeration():
    """Without chance: sum over all draws, weighted by their probability, gives the target's joint exactly."""
    target = TabularTarget(3, 7)
    rows = [(0, -1), (1, 0), (2, 0), (0, 1), (1, 3)]
    probs = target.row_probs(rows)
    draws = list(itertools.product(range(3), repeat=LENGTH))
    joint = torch.zeros(3**LENGTH, dtype=torch.float64)
    table = torch.tensor(draws)
    tree = batch_of(rows, len(draws))
    walk = walk_exact(tree, lambda row, active, depth: table[:, min(depth, LENGTH - 1)], max_emitted=LENGTH)
    for request, drawn in enumerate(draws):
        weight, history = 1.0, []
        for depth, token in enumerate(drawn):
            if depth < walk.num_emitted[request]:
                weight *= probs[walk.path_rows[request, depth], token]  # As the walk read it.
            else:
                index = target.index(torch.tensor([history], dtype=torch.int64))
                weight *= target.tables[depth][index[0], token]
            history.append(token)
        joint[target.index(torch.tensor([history]))] += weight
    torch.testing.assert_close(joint, target.exact(), rtol=1e-12, atol=1e-15)
