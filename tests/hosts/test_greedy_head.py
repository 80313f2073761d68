"""Greedy steps compute only logits that may be the largest; all others compute all."""

from __future__ import annotations

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.doubles import tiny
from tests.hosts.conftest import TREE, acceptance_length, answers_of, make_prompts, runner_of
from vllm_specplug.config import ALL_ROWS
from vllm_specplug.cpu.greedy_head import GreedyHead

GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
SMALL = {**TREE, "num_speculative_tokens": 10, "linear_rows": ALL_ROWS}


@pytest.fixture
def few(monkeypatch):
    """``few(llm)``: a list that gets, with each call of ``compute_logits``, whether logits were left out."""

    def watch(llm):
        head = runner_of(llm).greedy_head
        if head is None:
            pytest.skip("this CPU does not multiply 8-bit numbers, or multiplies in tiles")
        calls, compute = [], head.compute_logits

        def compute_logits(*args, **kwargs):
            logits = compute(*args, **kwargs)
            calls.append(bool((logits == float("-inf")).any()))
            return logits

        monkeypatch.setattr(runner_of(llm).model, "compute_logits", compute_logits)
        return calls

    return watch


@pytest.fixture(scope="module")
def prompts():
    return make_prompts(12, seed=5)


@pytest.fixture(scope="module")
def start(engine, checkpoints):
    tiny.write_tokenizer(checkpoints["target"])
    return lambda **options: engine("eagle", SMALL, skip_tokenizer_init=False, **options)


@pytest.mark.parametrize("max_num_seqs", [1, 4])
def test_same_as_plain(engine, start, few, prompts, max_num_seqs):
    params = SamplingParams(**GREEDY)
    llm = start(max_num_seqs=max_num_seqs)
    calls = few(llm)
    assert answers_of(llm, prompts, params) == answers_of(engine(), prompts, params)
    assert acceptance_length(llm) > 1.2
    assert any(calls) or max_num_seqs > 1  # many rows may need all blocks of this small vocabulary


@pytest.mark.parametrize(
    "other",
    [
        {"temperature": 0.8, "seed": 1},
        {"logprobs": 2},
        {"presence_penalty": 0.5},
        {"logit_bias": {3: -100.0}},
        {"allowed_token_ids": list(range(10, 60))},
    ],
    ids=lambda other: next(iter(other)),
)
def test_batches_that_need_other_logits_compute_all(start, few, prompts, other):
    llm = start(max_num_seqs=4)
    calls = few(llm)
    params = [SamplingParams(**{**GREEDY, **other}), SamplingParams(**{**GREEDY, "max_tokens": 4})]
    llm.generate(prompts[:2], params, use_tqdm=False)
    assert calls
    assert not any(calls)


def test_grammar(start, few, prompts):
    llm = start(max_num_seqs=4)
    calls = few(llm)
    params = SamplingParams(**GREEDY, structured_outputs=StructuredOutputsParams(regex="[a-e]{30,40}"))
    llm.generate(prompts[:1], params, use_tqdm=False)
    assert calls
    assert not any(calls)


def test_logprobs_of_a_prompt(start, few, prompts):
    """They are of the same step, after its greedy logits."""
    llm = start(max_num_seqs=4)
    few(llm)
    params = SamplingParams(**{**GREEDY, "max_tokens": 1}, prompt_logprobs=5)
    (answer,) = llm.generate(prompts[:1], params, use_tqdm=False)
    found = [one.logprob for position in answer.prompt_logprobs[1:] for one in position.values()]
    assert min(found) > float("-inf")


def test_scaled_logits_are_all_computed(start, few, monkeypatch):
    llm = start(max_num_seqs=4)
    few(llm)
    runner = runner_of(llm)
    monkeypatch.setattr(runner.model.logits_processor, "scale", 0.5)
    assert GreedyHead.make(runner.model, runner.model_config.get_hidden_size(), runner.model_config.dtype) is None
