"""Above temperature 0: coupled drafts keep the seed's tokens, rejection keeps the distribution."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chi2
from vllm import SamplingParams
from vllm.v1.sample.sampler import Sampler

from tests.host_versions import NOISE_IS_KNOWN
from tests.hosts.conftest import WHOLE, answers_of, make_prompts, runner_of
from vllm_specplug.cpu.accepting_walk import RejectionWalk
from vllm_specplug.cpu.drafters import draft_noise
from vllm_specplug.cpu.drafters.draft_noise import noise_is_known

COUPLED = {"method": "eagle2", "num_speculative_tokens": 8, "draft_depth": 4, "draft_top_k": 3, **WHOLE}
REJECTION = {**COUPLED, "verification": "rejection"}
KINDS = ({}, {"top_p": 0.8}, {"top_k": 12, "repetition_penalty": 1.2}, {"min_p": 0.05}, {"temperature": 0.0})


def parameters(count: int, **changes) -> list[SamplingParams]:
    settings = {"temperature": 0.9, "max_tokens": 40, "ignore_eos": True}
    return [SamplingParams(**{**settings, "seed": i, **KINDS[i % len(KINDS)], **changes}) for i in range(count)]


def test_the_host_draws_the_noise_that_is_drafted_with():
    assert noise_is_known(Sampler()) == NOISE_IS_KNOWN
    assert not noise_is_known(Sampler(use_fp64_gumbel=True))


def test_coupled_drafts_keep_the_seed(engine, emitted, monkeypatch):
    """Same tokens as plain decoding, with more of them per step than with the likeliest drafts."""
    prompts = make_prompts(15, seed=21)
    expected = answers_of(engine(), prompts, parameters(15))
    llm = engine("eagle", COUPLED)
    assert answers_of(llm, prompts, parameters(15)) == expected
    free = parameters(15, top_k=0, temperature=1.0, min_p=0.0, repetition_penalty=1.0)
    taus = []
    for _ in range(2):
        emitted.clear()
        llm.generate(prompts, free, use_tqdm=False)
        taus.append(sum(emitted) / len(emitted))
        monkeypatch.setattr(runner_of(llm).draft_noise, "couples", False)
    assert (taus[0] > taus[1] + 0.1) == NOISE_IS_KNOWN


def test_requests_without_a_seed_are_coupled_too(engine):
    """With generators of their own, which end with them."""
    llm = engine("eagle", COUPLED)
    llm.generate(make_prompts(6, seed=2), parameters(6, seed=None), use_tqdm=False)
    llm.generate(make_prompts(1), SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    assert runner_of(llm).draft_noise._own == {}


def test_rejection_follows_the_target(engine, monkeypatch):
    """The first four tokens of many answers, against those of plain decoding."""
    walked = []
    honest = RejectionWalk.accept

    def counted(self, *args):
        accepted = honest(self, *args)
        walked.append(int((accepted >= 0).sum()))
        return accepted

    monkeypatch.setattr(RejectionWalk, "accept", counted)
    prompt = make_prompts(1, seed=11)[0]
    count = 700
    params = SamplingParams(temperature=1.0, top_k=3, max_tokens=4, ignore_eos=True, n=count)
    plain, ours = (
        [tuple(sample.token_ids) for sample in llm.generate([prompt], params, use_tqdm=False)[0].outputs]
        for llm in (engine(), engine("eagle", REJECTION))
    )
    assert sum(walked) > count  # tokens were accepted by rejection
    assert same_distribution(plain, ours) > 1e-4
    shifted = [(*answer[:2], *other[2:]) for answer, other in zip(ours, ours[1:] + ours[:1], strict=True)]
    assert same_distribution(plain, shifted) < 1e-4  # control: tokens that do not belong to what stands before


def same_distribution(one: list[tuple], other: list[tuple]) -> float:
    """Chi-square test of homogeneity; answers seen fewer than ten times are taken together."""
    counts = {answer: (one.count(answer), other.count(answer)) for answer in {*one, *other}}
    table = [pair for pair in counts.values() if sum(pair) >= 10]
    table.append((len(one) - sum(p[0] for p in table), len(other) - sum(p[1] for p in table)))
    table = torch.tensor([pair for pair in table if sum(pair)], dtype=torch.float64)
    expected = table.sum(1, keepdim=True) * table.sum(0) / table.sum()
    return float(chi2.sf(float(((table - expected) ** 2 / expected).sum()), len(table) - 1))


def test_rejection_walks_exactly_what_it_cannot_serve(engine):
    """Greedy requests and those whose distribution more than temperature, top_k and top_p shapes keep their tokens."""
    kinds = [
        {"temperature": 0.0},
        {"repetition_penalty": 1.3},
        {"min_p": 0.1},
        {"logit_bias": {7: 3.0}},
        {"logprobs": 1},
    ]
    params = [
        SamplingParams(**{"temperature": 0.9, "seed": i, "max_tokens": 30, "ignore_eos": True, **kinds[i % 5]})
        for i in range(10)
    ]
    prompts = make_prompts(10, seed=4)
    expected = answers_of(engine(), prompts, params)
    assert answers_of(engine("eagle", REJECTION), prompts, params) == expected


@pytest.mark.parametrize("batch", [1, 8])
def test_rejection_repeats_itself_with_the_same_seed(engine, batch):
    """Draws come from the request's generator; other tokens than plain decoding's, the same every time."""
    llm = engine("eagle", REJECTION)
    prompts = make_prompts(batch, seed=6)
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=30, ignore_eos=True) for i in range(batch)]
    answers = [answers_of(llm, prompts, params) for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0] != answers_of(engine(), prompts, params)


def test_unknown_noise_is_not_drafted_with(monkeypatch, engine, caplog):
    """Where the host's sampler differs, drafts are the likeliest tokens, and the log says so."""
    runner = runner_of(engine("eagle", COUPLED))
    monkeypatch.setattr(draft_noise, "gumbel_noise", lambda seeds, ids: torch.zeros(len(seeds), len(ids)))
    with caplog.at_level("WARNING", logger="vllm_specplug"):
        noise = draft_noise.DraftNoise(runner, runner.speculative_config.specplug, False)
    assert not noise.couples and noise.sampling(3, 1) is None
    assert "not coupled with the sampler's noise" in caplog.text
