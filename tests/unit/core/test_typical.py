"""Typical acceptance against a candidate-by-candidate implementation of the paper's formula."""

from __future__ import annotations

import math
import random

import pytest
import torch

from vllm_specplug.config import ConfigError, TreeOptions
from vllm_specplug.core.request_args import request_limits
from vllm_specplug.core.tree import from_flat
from vllm_specplug.core.typical import accept_typical, accept_typical_nodes, path_token_ids, threshold

VOCAB = 7


def expected_path(token_ids, parents, distributions, epsilon, delta):
    """The paper, section 2.3.1: every root-to-node path is a candidate; the longest accepted prefix wins."""
    best, best_score = [0], (0, 0.0)
    for row in range(len(parents)):
        path = [row]
        while path[0] != 0:
            path.insert(0, parents[path[0]])
        log_likelihood, passed = 0.0, True
        for parent, node in zip(path, path[1:], strict=False):
            p = distributions[parent]
            entropy = -sum(x * math.log(x) for x in p if x > 0)
            passed = passed and p[token_ids[node]] > min(epsilon, delta * math.exp(-entropy))
            log_likelihood += math.log(p[token_ids[node]]) if p[token_ids[node]] > 0 else -math.inf
        score = (len(path) - 1, log_likelihood)
        if passed and score > best_score:
            best, best_score = path, score
    return best


def random_tree(rng, num_rows):
    parents, token_ids, children = [-1], [0], {0: set()}
    while len(parents) < num_rows:
        parent = rng.randrange(len(parents))
        token = rng.randrange(VOCAB)
        if token not in children[parent]:
            children[parent].add(token)
            children[len(parents)] = set()
            parents.append(parent)
            token_ids.append(token)
    return token_ids, parents


def values_of_nodes(tree, log_probs, epsilon, delta):
    """The tree, and log-probability and limit of each node at its parent."""
    limits = threshold(log_probs, epsilon.unsqueeze(1), delta.unsqueeze(1))
    parents = tree.parents.clamp(min=0)
    of_parent = log_probs.gather(1, parents.unsqueeze(2).expand_as(log_probs))
    child = of_parent.gather(2, tree.token_ids.clamp(min=0).unsqueeze(2)).squeeze(2)
    return tree, child, limits.gather(1, parents)


@pytest.mark.parametrize("seed", range(30))
def test_equal_to_the_formula_on_random_trees(seed):
    rng = random.Random(seed)
    num_reqs, num_rows = 4, rng.randrange(2, 14)
    trees = [random_tree(rng, num_rows) for _ in range(num_reqs)]
    counts = [rng.randrange(1, num_rows + 1) for _ in range(num_reqs)]
    logits = torch.randn(num_reqs, num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    logits[torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed)) < 0.1] = float("-inf")
    log_probs = logits.log_softmax(-1)
    limits = [(rng.choice([0.0, 0.09, 0.3, 1.0]), rng.choice([0.0, 0.3, 1.0, 5.0])) for _ in range(num_reqs)]
    active = torch.tensor([True, True, True, seed % 2 == 0])
    tree = from_flat(*(torch.tensor(values) for values in ([t for t, _ in trees], [p for _, p in trees], counts)))
    epsilon, delta = torch.tensor(limits).unbind(1)
    last = accept_typical(tree, lambda requests, rows: log_probs[requests, rows], epsilon, delta, active)
    tokens = path_token_ids(tree, last)
    for_all = accept_typical_nodes(*values_of_nodes(tree, log_probs, epsilon, delta), active, 13)
    assert torch.equal(for_all, last)
    assert torch.equal(path_token_ids(tree, last, 13)[:, : tokens.shape[1]], tokens)
    for r, (token_ids, parents) in enumerate(trees):
        path = [0]
        if active[r]:
            probs = log_probs[r].exp().double().tolist()
            path = expected_path(token_ids[: counts[r]], parents[: counts[r]], probs, *limits[r])
        assert int(last[r]) == path[-1]
        assert [t for t in tokens[r].tolist() if t >= 0] == [token_ids[row] for row in path[1:]]


def test_threshold_falls_with_the_entropy():
    even = torch.full((4,), 0.25).log()
    certain = torch.tensor([1.0, 0, 0, 0]).log()
    big = torch.tensor(1.0)
    assert threshold(even, big, torch.tensor(0.4)).item() == pytest.approx(0.1)
    assert threshold(certain, big, torch.tensor(0.4)).item() == pytest.approx(0.4)
    assert threshold(certain, torch.tensor(0.09), torch.tensor(0.4)).item() == pytest.approx(0.09)


def test_a_request_brings_its_own_limits_or_an_error():
    typical = TreeOptions(verification="typical", typical_epsilon=0.2, typical_delta=0.5)
    assert request_limits(None, typical) == (0.2, 0.5)
    assert request_limits({"other": 1, "typical_delta": 1}, typical) == (0.2, 1.0)
    with pytest.raises(ConfigError, match="typical_epsilon=1.5 is out of range"):
        request_limits({"typical_epsilon": 1.5}, typical)
    with pytest.raises(ConfigError, match="typical_delta must be a number"):
        request_limits({"typical_delta": "high"}, typical)
    with pytest.raises(ConfigError, match="this server verifies drafts exactly"):
        request_limits({"typical_delta": 0.3}, TreeOptions())
    assert request_limits({"other": 1}, TreeOptions())
    with pytest.raises(ConfigError, match="typical_epsilon=-1 is out of range"):
        TreeOptions(typical_epsilon=-1)
