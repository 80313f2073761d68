"""Seeded sampling and every sampling parameter: the same tokens as plain vLLM with the same seeds."""

from __future__ import annotations

import pytest
from vllm import SamplingParams

from tests.hosts.conftest import make_prompts, token_ids

PARAMETERS = {
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1.0": {"temperature": 1.0},
    "top_k": {"temperature": 1.0, "top_k": 7},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "top_k and top_p": {"temperature": 0.9, "top_k": 20, "top_p": 0.9},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "repetition penalty": {"temperature": 0.8, "repetition_penalty": 1.3},
    "presence and frequency penalties": {"temperature": 0.8, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    "logit_bias": {"temperature": 0.8, "logit_bias": {7: 3.0, 9: -4.0}},
    "allowed_token_ids": {"temperature": 0.8, "allowed_token_ids": list(range(10, 60))},
    "min_tokens": {"temperature": 1.0, "min_tokens": 12, "ignore_eos": False, "stop_token_ids": list(range(20, 60))},
    "stop tokens": {"temperature": 0.7, "ignore_eos": False, "stop_token_ids": [40, 41, 42, 43, 44, 45]},
    "n = 2": {"temperature": 1.0, "n": 2},
    "greedy with repetition penalty": {"temperature": 0.0, "repetition_penalty": 1.5},
    "greedy with logit_bias": {"temperature": 0.0, "logit_bias": {7: 2.0}},
    "greedy with min_tokens": {
        "temperature": 0.0, "min_tokens": 9, "ignore_eos": False, "stop_token_ids": list(range(20, 90)),
    },
}  # fmt: skip


def parameters(changes: dict, index: int) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 30, "ignore_eos": True, "seed": 1000 + index, **changes})


@pytest.mark.parametrize("name", PARAMETERS)
def test_same_tokens_as_plain(engine, name):
    prompts = make_prompts(12, seed=3)
    params = [parameters(PARAMETERS[name], i) for i in range(len(prompts))]
    expected = token_ids(engine().generate(prompts, params, use_tqdm=False))
    assert token_ids(engine("eagle").generate(prompts, params, use_tqdm=False)) == expected


def test_mixed_batch(engine):
    """Requests of every kind in one batch, some greedy, some seeded."""
    prompts = make_prompts(2 * len(PARAMETERS), seed=5)
    kinds = list(PARAMETERS.values()) * 2
    params = [parameters(changes, i) for i, changes in enumerate(kinds)]
    expected = token_ids(engine().generate(prompts, params, use_tqdm=False))
    assert token_ids(engine("eagle").generate(prompts, params, use_tqdm=False)) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("logprobs", [0, 3, -1])
def test_logprobs(engine, temperature, logprobs):
    options = {"max_logprobs": 200}
    prompts = make_prompts(6, seed=7)
    params = [
        SamplingParams(temperature=temperature, max_tokens=16, ignore_eos=True, seed=i, logprobs=logprobs)
        for i in range(len(prompts))
    ]
    expected = engine(**options).generate(prompts, params, use_tqdm=False)
    outputs = engine("eagle", **options).generate(prompts, params, use_tqdm=False)
    assert token_ids(outputs) == token_ids(expected)
    for output, reference in zip(outputs, expected, strict=True):
        for found, wanted in zip(output.outputs[0].logprobs, reference.outputs[0].logprobs, strict=True):
            assert found.keys() == wanted.keys()
            for token_id in wanted:
                # Over the whole vocabulary, tokens nearly equal may swap places by rounding.
                assert abs(found[token_id].rank - wanted[token_id].rank) <= (2 if logprobs == -1 else 0)
                assert found[token_id].logprob == pytest.approx(wanted[token_id].logprob, abs=1e-4)


def test_seeds_matter(engine):
    """Control: with other seeds the tokens differ, so the identities above are not trivial."""
    prompts = make_prompts(6, seed=3)
    first = [parameters({"temperature": 1.0}, i) for i in range(6)]
    other = [parameters({"temperature": 1.0}, i + 50) for i in range(6)]
    llm = engine("eagle")
    assert token_ids(llm.generate(prompts, first, use_tqdm=False)) != token_ids(
        llm.generate(prompts, other, use_tqdm=False)
    )


def test_unseeded_sampling_follows_the_target(engine):
    """Chi-square of the first two tokens without seeds, against the target's own probabilities."""
    import math

    from scipy.stats import chi2

    prompt = make_prompts(1, seed=11)[0]
    count, top_k = 1500, 4
    llm = engine("eagle")
    params = SamplingParams(temperature=1.0, top_k=top_k, max_tokens=3, ignore_eos=True, n=count)
    seen: dict[tuple[int, int], int] = {}
    for sample in llm.generate([prompt], params, use_tqdm=False)[0].outputs:
        pair = tuple(sample.token_ids[1:3])
        triple = (sample.token_ids[0], *pair)
        seen[triple] = seen.get(triple, 0) + 1

    plain = engine()
    one = SamplingParams(temperature=0, max_tokens=1, logprobs=top_k)

    def distribution(history: list[int]) -> dict[int, float]:
        output = plain.generate([{"prompt_token_ids": prompt["prompt_token_ids"] + history}], one, use_tqdm=False)
        weights = {t: math.exp(entry.logprob) for t, entry in output[0].outputs[0].logprobs[0].items()}
        total = sum(weights.values())
        return {t: weight / total for t, weight in weights.items()}

    expected: dict[tuple[int, ...], float] = {}
    for a, p in distribution([]).items():
        for b, q in distribution([a]).items():
            for c, r in distribution([a, b]).items():
                expected[a, b, c] = p * q * r
    assert set(seen) <= set(expected)
    statistic = rest = seen_rest = 0.0
    cells = 0
    for triple, probability in expected.items():
        if probability * count < 5:
            rest, seen_rest = rest + probability * count, seen_rest + seen.get(triple, 0)
            continue
        statistic += (seen.get(triple, 0) - probability * count) ** 2 / (probability * count)
        cells += 1
    if rest >= 5:
        statistic += (seen_rest - rest) ** 2 / rest
        cells += 1
    assert chi2.sf(statistic, cells - 1) > 1e-4
