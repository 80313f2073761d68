"""Trees from heads that predict all positions at once, whose logits may depend on the token before."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import torch

from tests.unit.proposers.test_best_paths import paths_of
from vllm_specplug.core.draft_sampling import likeliest
from vllm_specplug.core.growth import TORCH, TORCH_STATIC
from vllm_specplug.proposers.dflash.drafting import grow_block
from vllm_specplug.vllm.drafters.block_head import BlockHead

VOCAB, POSITIONS, RANK, HIDDEN = 6, 3, 4, 5


def test_the_best_paths_of_pairs():
    """All paths are enumerated."""
    torch.manual_seed(0)
    base, pairs = torch.randn(2, POSITIONS, VOCAB), torch.randn(VOCAB, VOCAB)
    roots = torch.tensor([1, 4])

    def children(position, token_ids, top_k):
        logits = base[:, position, None] + pairs[token_ids]
        return likeliest(logits.flatten(0, 1), top_k)

    for ops in (TORCH, TORCH_STATIC):
        draft = grow_block(
            roots, children, num_positions=POSITIONS, num_nodes=7, width=VOCAB, min_node_value=0.0, ops=ops
        )
        for request, root in enumerate(roots.tolist()):
            values = {}
            for length in range(1, POSITIONS + 1):
                for path in itertools.product(range(VOCAB), repeat=length):
                    before = (root, *path)
                    logs = [(base[request, i] + pairs[before[i]]).log_softmax(0)[token] for i, token in enumerate(path)]
                    values[path] = float(sum(logs))
            best = sorted(values, key=values.get, reverse=True)[:7]
            found = paths_of(draft, request)
            assert set(found) == set(best)
            assert all(abs(found[path] - values[path]) < 1e-5 for path in best)


class _Biased:
    """As vLLM's DSpark; with a draft vocabulary of every second token."""

    def __init__(self, **entries):
        torch.manual_seed(2)
        self.model, self.config = SimpleNamespace(), SimpleNamespace(**entries)
        self.weight, self.first, self.second = torch.randn(3, HIDDEN), torch.randn(VOCAB, RANK), torch.randn(3, RANK)
        self.draft_id_to_target_id = torch.arange(3)

    def compute_draft_logits(self, hidden):
        return hidden @ self.weight.T

    def markov_embed(self, token_ids):
        return self.first[token_ids]

    def markov_bias(self, embedded):
        return embedded @ self.second.T


def test_a_bias_by_the_token_before():
    model, hidden, tokens = _Biased(), torch.randn(2, POSITIONS, HIDDEN), torch.tensor([[1, 5], [0, 2]])
    head = BlockHead(model)
    assert head.is_pairwise and head.predicts_at_root and head.draft_ids.tolist() == [0, 2, 4]
    assert not BlockHead(_Biased(sample_from_anchor=False)).predicts_at_root
    head.read(hidden)
    expected = hidden[:, 1, None] @ model.weight.T + model.first[tokens] @ model.second.T
    assert torch.allclose(head.logits_after(1, tokens), expected.flatten(0, 1))


class _Selecting:
    """As vLLM's DFlash 2, with three candidates of each position."""

    def __init__(self):
        torch.manual_seed(3)
        self.weight, self.config = torch.randn(VOCAB, HIDDEN), SimpleNamespace(dflash_config={})
        projection = torch.nn.Linear(HIDDEN, RANK, bias=False)
        selector = SimpleNamespace(
            predecessor_codebook=torch.randn(VOCAB, RANK),
            successor_codebook=torch.randn(VOCAB, RANK),
            hidden_projection=projection.requires_grad_(False),
        )
        self.model = SimpleNamespace(candidate_selector=selector)

    def compute_candidates(self, hidden):
        values, candidates = (hidden @ self.weight.T).topk(3)
        return candidates, values


def test_candidates_by_the_token_before():
    model, hidden, tokens = _Selecting(), torch.randn(2, POSITIONS, HIDDEN), torch.tensor([[1, 5], [0, 2]])
    head, selector = BlockHead(model), model.model.candidate_selector
    assert head.is_pairwise and not head.predicts_at_root and head.draft_ids is None
    head.read(hidden)
    found = head.logits_after(2, tokens).unflatten(0, (2, 2))
    for request, place in itertools.product(range(2), range(2)):
        unary = hidden[request, 2] @ model.weight.T
        before = selector.predecessor_codebook[tokens[request, place]] * selector.hidden_projection(hidden[request, 2])
        scores = unary + selector.successor_codebook @ before
        best = unary.topk(3).indices
        assert torch.allclose(found[request, place, best], scores[best], atol=1e-5)
        assert (found[request, place] > float("-inf")).sum() == 3
