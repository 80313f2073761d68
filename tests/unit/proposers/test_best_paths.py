"""Trees of the best paths over distributions of positions, against all paths."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from vllm_specplug.core.draft_sampling import Children
from vllm_specplug.core.growth import TORCH
from vllm_specplug.cpu.kernels.tree_ops import OPERATORS
from vllm_specplug.proposers.dflash.drafting import WIDTH, grow_block, same_after_all

NEVER = float("-inf")


def every_path(token_ids, log_probs):
    """Values of all paths of one request, by their tokens."""
    num_positions, num_candidates = token_ids.shape
    values = {}
    for depth in range(1, num_positions + 1):
        for ranks in itertools.product(range(num_candidates), repeat=depth):
            tokens = tuple(int(token_ids[place, rank]) for place, rank in enumerate(ranks))
            values[tokens] = sum(float(log_probs[place, rank]) for place, rank in enumerate(ranks))
    return {tokens: value for tokens, value in values.items() if value > NEVER}


def paths_of(draft, request):
    """Values of a draft's nodes, by the tokens of their paths."""
    tree, found = draft.tree, {}
    for row in range(1, int(tree.num_rows[request])):
        tokens, at = [], row
        while at:
            tokens.append(int(tree.token_ids[request, at]))
            at = int(tree.parents[request, at])
        found[tuple(reversed(tokens))] = float(draft.log_values[request, row])
    return found


def inputs(num_reqs, num_positions, num_candidates, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(num_reqs, num_positions, 4 * num_candidates, generator=generator)
    log_probs, token_ids = logits.log_softmax(-1).topk(num_candidates)
    return torch.arange(num_reqs), token_ids, log_probs


def best_paths(root_token_ids, token_ids, log_probs, num_nodes, ops=TORCH, **options):
    """Grow trees from the tokens of each position, ``[num_reqs, num_positions, num_candidates]``, and their values."""

    def of_position(position, top_k):
        return Children(token_ids[:, position, :top_k], log_probs[:, position, :top_k])

    width = min(WIDTH, token_ids.shape[2])
    shape = {"num_positions": token_ids.shape[1], "num_nodes": num_nodes, "width": width}
    return grow_block(root_token_ids, same_after_all(of_position), **shape, ops=ops, **options)


@pytest.mark.parametrize("ops", [TORCH, OPERATORS])
@pytest.mark.parametrize("num_nodes", [1, 2, 5, 12, 16])
def test_the_best_of_all_paths(num_nodes, ops):
    root, token_ids, log_probs = inputs(2, 3, 16)
    draft = best_paths(root, token_ids, log_probs, num_nodes, ops)
    for request in range(2):
        every = every_path(token_ids[request, :, :num_nodes], log_probs[request, :, :num_nodes])
        best = sorted(every.values(), reverse=True)[:num_nodes]
        found = paths_of(draft, request)
        assert len(found) == min(num_nodes, len(every))
        assert sorted(found.values(), reverse=True) == pytest.approx(best, abs=1e-5)
        assert all(found[path] == pytest.approx(every[path], abs=1e-5) for path in found)


def test_unlikely_nodes_and_missing_candidates():
    token_ids = torch.tensor([[[7, 8], [9, 8]]])
    log_probs = torch.tensor([[[0.6, 0.3], [0.5, 0.0]]]).log()
    found = paths_of(best_paths(torch.tensor([1]), token_ids, log_probs, 8), 0)
    assert {path: round(math.exp(value), 3) for path, value in found.items()} == {
        (7,): 0.6, (8,): 0.3, (7, 9): 0.3, (8, 9): 0.15,
    }  # fmt: skip
    draft = best_paths(torch.tensor([1]), token_ids, log_probs, 8, min_node_value=0.2)
    assert paths_of(draft, 0).keys() == {(7,), (8,), (7, 9)}


def test_ties_keep_ancestors():
    token_ids = torch.arange(6).view(1, 3, 2)
    draft = best_paths(torch.tensor([9]), token_ids, torch.zeros(1, 3, 2), 3)
    assert paths_of(draft, 0).keys() == {(0,), (1,), (0, 2)}


def test_trees_of_many_nodes_lose_little():
    """Only so many nodes of a position have children."""
    root, token_ids, log_probs = inputs(2, 3, 16)
    found = best_paths(root, token_ids, log_probs, 63).log_values.exp()
    for request in range(2):
        every = every_path(token_ids[request], log_probs[request])
        best = sum(math.exp(value) for value in sorted(every.values(), reverse=True)[:63])
        assert float(found[request, 1:].sum()) > 0.99 * best
