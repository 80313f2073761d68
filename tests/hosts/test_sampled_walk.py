"""The walk over a sampler, without an engine: against the oracle, on random trees."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from tests.unit import oracle
from tests.unit.oracle_tensors import emitted, to_tree
from vllm_specplug.hosts.sampling import SampledWalk


@dataclass
class Metadata:
    """What the walk reads of the host's sampling metadata."""

    max_num_logprobs: int | None = None
    generators: dict = field(default_factory=dict)
    spec_token_ids: list | None = None
    logitsprocs: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(all=[]))


def greedy(logits, sampling_metadata):
    tokens = logits.argmax(dim=1, keepdim=True).to(torch.int32)
    return SimpleNamespace(sampled_token_ids=tokens, logprobs_tensors=None)


@pytest.mark.parametrize("max_num_logprobs", [None, -1])
def test_walks_equal_the_oracle(max_num_logprobs):
    rng, vocab_size = oracle.seeded(5), 4
    for _ in range(150):
        trees = [oracle.random_tree(rng, 12, vocab_size) for _ in range(rng.randint(1, 5))]
        tree = to_tree(trees)
        width = tree.token_ids.shape[1]
        logits = torch.rand(len(trees) * width, vocab_size)
        first_rows = torch.arange(len(trees)) * width
        active = torch.tensor([rng.random() < 0.8 for _ in trees])
        histories = [[1, 2] for _ in trees]
        walk_trees = SampledWalk(greedy, Metadata(max_num_logprobs), histories)
        walk, output = walk_trees(tree, logits, first_rows, active)
        assert histories == [[1, 2] for _ in trees]
        assert output.sampled_token_ids is walk.output_token_ids and walk.output_token_ids.dtype == torch.int32
        best = logits.argmax(dim=1).view(len(trees), width).tolist()
        longest = 0
        for request, rows in enumerate(trees):
            expected = ([], [])
            if active[request]:

                def choose(row, _, tokens=best[request]):
                    return tokens[row]

                limit = 1 if max_num_logprobs == -1 else None
                expected = oracle.walk(rows, choose, limit)
            assert emitted(walk, request) == tuple(expected)
            longest = max(longest, len(expected[0]))
        assert walk.output_token_ids.shape == walk.path_rows.shape == (len(trees), max(longest, 1))
        assert (walk.path_rows[:, 0] == 0).all()
