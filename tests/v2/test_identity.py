"""Token identity with plain decoding on the V2 model runner, in float32."""

from __future__ import annotations

import pytest
import torch
from vllm import SamplingParams

from tests.hosts.conftest import acceptance_length, make_prompts, runner_of, token_ids
from vllm_specplug.hosts.v2_runner import TreeRunner
from vllm_specplug.hosts.v2_trees import DeviceTrees

#: With logprobs: an error in the key/value shows there long before it changes a token.
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
TREE = {"num_speculative_tokens": 9, "draft_depth": 3, "draft_top_k": 3}
CHAIN = {"num_speculative_tokens": 3, "draft_depth": 3, "draft_top_k": 1}
#: Blocks of 16 tokens, so that contexts span several and requests are short: the interpreter is slow.
ENGINE = {"block_size": 16}
#: The host's CPU attention takes no smaller ones.
PLAIN = {"block_size": 32}


@pytest.fixture(scope="module")
def prompts():
    return make_prompts(3, longest=40)


def answers(llm, prompts, params=GREEDY):
    """Token ids of every answer, and the log-probability of every token."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    logprobs = [
        [step[token].logprob for step, token in zip(one.logprobs, one.token_ids, strict=True)]
        for one in (output.outputs[0] for output in outputs)
        if one.logprobs is not None
    ]
    return token_ids(outputs), logprobs


def same(ours, theirs):
    """Equal tokens, and logprobs that differ by rounding only."""
    return ours[0] == theirs[0] and all(
        mine == pytest.approx(his, abs=1e-4) for mine, his in zip(ours[1], theirs[1], strict=True)
    )


@pytest.fixture(scope="module")
def plain(engine, prompts):
    return answers(engine(**PLAIN), prompts)


@pytest.fixture(scope="module")
def llm(engine):
    return engine("eagle", TREE, **ENGINE)


def test_greedy_trees(prompts, plain, llm):
    assert isinstance(runner_of(llm), TreeRunner)
    assert same(answers(llm, prompts), plain)
    assert acceptance_length(llm) > 1.2  # else trees would not have been exercised


def test_greedy_chains(engine, prompts, plain):
    llm = engine("eagle", CHAIN, **ENGINE)
    assert same(answers(llm, prompts), plain)


SAMPLED = [
    SamplingParams(temperature=0.8, seed=1, max_tokens=6, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.2, seed=2, top_k=9, top_p=0.9, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=3, min_p=0.05, logit_bias={7: 2.0}, max_tokens=6, min_tokens=3),
]
#: What depends on the tokens before: sampled depth by depth.
WITH_HISTORY = [
    SamplingParams(temperature=0.9, seed=4, repetition_penalty=1.4, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0, frequency_penalty=0.8, presence_penalty=0.5, max_tokens=6, ignore_eos=True),
]


@pytest.mark.parametrize("params", [SAMPLED, WITH_HISTORY], ids=["parallel", "by depth"])
def test_same_seed_same_tokens(engine, llm, prompts, params):
    prompts = prompts[: len(params)]
    expected = answers(engine(**PLAIN), prompts, params)
    assert same(answers(llm, prompts, params), expected)


def test_prefix_cache_hits_on_blocks_written_by_trees(engine, llm, prompts):
    plain = engine(**PLAIN)
    first = token_ids(plain.generate(prompts[:2], GREEDY, use_tqdm=False))
    llm.generate(prompts[:2], GREEDY, use_tqdm=False)
    grown = [
        {"prompt_token_ids": [*prompt["prompt_token_ids"], *answer[0], 5]}
        for prompt, answer in zip(prompts, first, strict=False)
    ]
    expected = token_ids(plain.generate(grown, GREEDY, use_tqdm=False))
    outputs = llm.generate(grown, GREEDY, use_tqdm=False)
    assert sum(output.num_cached_tokens for output in outputs) >= 2 * 16
    assert token_ids(outputs) == expected


def test_forced_preemption_and_chunked_prefill(engine, prompts, plain):
    llm = engine(
        "eagle", TREE, max_model_len=96, num_gpu_blocks_override=7, max_num_batched_tokens=24, max_num_seqs=3, **ENGINE
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempted = []
    preempt = scheduler._preempt_request
    scheduler._preempt_request = lambda *args, **kwargs: (preempted.append(args), preempt(*args, **kwargs))[1]
    try:
        assert same(answers(llm, prompts), plain)
    finally:
        scheduler._preempt_request = preempt
    assert preempted


def skip_moves(patch, runner):
    patch.setattr(runner.rejection_sampler, "commit", lambda *_: None)


def wrong_bit(patch, _):
    """Rows see the first node whether or not it is an ancestor."""
    honest = DeviceTrees.stage

    def stage(self, input_batch):
        rows = honest(self, input_batch)
        self.bits[:, 2:, 0] ^= 2
        return rows

    patch.setattr(DeviceTrees, "stage", stage)


def stale_positions(patch, _):
    """Rows at their flat positions."""
    honest = DeviceTrees.stage

    def stage(self, input_batch):
        flat = input_batch.positions.clone()
        rows = honest(self, input_batch)
        input_batch.positions.copy_(flat)
        return rows

    patch.setattr(DeviceTrees, "stage", stage)


@pytest.mark.parametrize("spoil", [skip_moves, wrong_bit, stale_positions])
def test_controls(llm, prompts, plain, monkeypatch, spoil):
    """The negative controls: each must make the identity tests fail."""
    spoil(monkeypatch, runner_of(llm))
    llm.reset_prefix_cache()
    try:
        spoiled = answers(llm, prompts)
    finally:
        llm.reset_prefix_cache()  # of what was computed wrongly
    assert not same(spoiled, plain)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_cuda_graphs(engine, prompts, plain, async_scheduling):
    """Verification and the drafter's first forward from recorded graphs."""
    llm = engine("eagle", TREE, enforce_eager=False, async_scheduling=async_scheduling, **ENGINE)
    assert same(answers(llm, prompts), plain)


class NoLookAtTheDevice(torch.utils._python_dispatch.TorchDispatchMode):
    """Fails on what would make the host wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2"), name
        return func(*args, **(kwargs or {}))


def test_a_round_never_waits_for_the_device(llm, prompts, plain, monkeypatch):
    """From the sampled rows to the next drafts, no value is read back."""
    runner = runner_of(llm)
    rounds = []

    def watched(function):
        def call(*args, **kwargs):
            rounds.append(function)
            with NoLookAtTheDevice():
                return function(*args, **kwargs)

        return call

    monkeypatch.setattr(runner, "rejection_sampler", watched(runner.rejection_sampler))
    monkeypatch.setattr(runner.speculator, "_growth", watched(runner.speculator._growth))
    assert token_ids(llm.generate(prompts[:2], GREEDY, use_tqdm=False)) == plain[0][:2]
    assert len(rounds) > 4
