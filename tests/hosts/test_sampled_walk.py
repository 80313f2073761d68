"""The walk over a sampler, without an engine: against the oracle, on random trees."""

from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import (
    BUILTIN_LOGITS_PROCESSORS,
    BatchUpdate,
    LogitsProcessors,
    MinPLogitsProcessor,
)
from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from tests.doubles import oracle
from tests.doubles.oracle_tensors import emitted, to_tree
from vllm_specplug.cpu.walk import SampledWalk, is_argmax


def metadata(processors=(), **changes):
    """The host's, of a greedy batch."""
    empty = torch.empty(0)
    settings = {
        "temperature": None, "all_greedy": True, "all_random": False, "top_p": None, "top_k": None, "generators": {},
        "max_num_logprobs": None, "no_penalties": True, "prompt_token_ids": None, "frequency_penalties": empty,
        "presence_penalties": empty, "repetition_penalties": empty, "output_token_ids": [],
        "allowed_token_ids_mask": None, "bad_words_token_ids": {}, "logitsprocs": LogitsProcessors(processors),
    }  # fmt: skip
    return SamplingMetadata(**{**settings, **changes})


def builtin(params):
    """The host's own processors, with one request."""
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=2))
    processors = [make(config, torch.device("cpu"), False) for make in BUILTIN_LOGITS_PROCESSORS]
    for processor in processors:
        processor.update_state(BatchUpdate(batch_size=1, removed=[], added=[(0, params, [1], [])], moved=[]))
    return processors


class Custom(MinPLogitsProcessor):
    """It says that it keeps the largest logit; a subclass may do more."""


class CustomBias(LogitBiasLogitsProcessor):
    """A logits processor that no request uses may still change the logits."""


def test_a_batch_of_which_the_largest_logits_are_taken():
    assert is_argmax(metadata(builtin(SamplingParams(temperature=0, min_p=0.2))))


@pytest.mark.parametrize(
    "changes",
    [
        {"all_greedy": False},
        {"max_num_logprobs": 0},
        {"logprob_token_ids": {0: [1]}},
        {"no_penalties": False},
        {"allowed_token_ids_mask": torch.ones(1, 4, dtype=torch.bool)},
        {"bad_words_token_ids": {0: [[1]]}},
        {"thinking_budget_state_holder": SimpleNamespace(has_tracked_requests=lambda: True)},
        {"processors": builtin(SamplingParams(temperature=0, min_tokens=3))},
        {"processors": builtin(SamplingParams(temperature=0, logit_bias={1: 2.0}))},
        {"processors": [CustomBias(None, torch.device("cpu"), False)]},
        {"processors": [Custom(SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=2)), "cpu", False)]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_only_the_hosts_sampler_knows(changes):
    assert not is_argmax(metadata(**changes))


def greedy(logits, sampling_metadata):
    tokens = logits.argmax(dim=1, keepdim=True).to(torch.int32)
    return SimpleNamespace(sampled_token_ids=tokens, logprobs_tensors=None)


def never(logits, sampling_metadata):
    raise AssertionError("the largest logits are known without the sampler")


def test_the_hosts_sampler_takes_the_first_largest_too():
    """What ``greedy_walk`` takes for it (tests/unit/kernels/test_greedy_walk.py compares that with torch.argmax)."""
    nan, inf = float("nan"), float("inf")
    rows = [[1, 3, 3, 2], [-1, -0.0, 0.0, -2], [1, nan, 2, nan], [-inf] * 4, [0, inf, inf, 1]]
    logits = torch.tensor(rows)
    for dtype in (torch.float32, torch.bfloat16):
        found = Sampler()(logits.to(dtype), metadata()).sampled_token_ids
        assert torch.equal(found, logits.argmax(dim=1, keepdim=True).to(torch.int32))


@pytest.mark.parametrize("max_num_logprobs, by_sampler", [(None, True), (-1, True), (None, False)])
def test_walks_equal_the_oracle(max_num_logprobs, by_sampler):
    rng, vocab_size = oracle.seeded(5), 4
    sampling_metadata = metadata(max_num_logprobs=max_num_logprobs, all_greedy=not by_sampler)
    for _ in range(150):
        trees = [oracle.random_tree(rng, 12, vocab_size) for _ in range(rng.randint(1, 5))]
        tree = to_tree(trees)
        width = tree.token_ids.shape[1]
        logits = torch.rand(len(trees) * width, vocab_size)
        first_rows = torch.arange(len(trees)) * width
        active = torch.tensor([rng.random() < 0.8 for _ in trees])
        histories = [[1, 2] for _ in trees]
        walk_trees = SampledWalk(greedy if by_sampler else never, sampling_metadata, histories)
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
