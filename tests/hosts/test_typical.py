"""Typical acceptance in the real engine: greedy at temperature 0, the formula above it, exact where it must be."""

from __future__ import annotations

import json

import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.hosts.conftest import WHOLE, acceptance_length, answers_of, counters, make_prompts
from tests.unit.core.test_typical import expected_path

TYPICAL = {"method": "eagle2", "num_speculative_tokens": 16, "verification": "typical", **WHOLE}
#: Limits that no probability exceeds.
NEVER = {"typical_epsilon": 1.0, "typical_delta": 1e6}


@pytest.fixture(scope="module")
def prompts():
    return make_prompts(16, seed=9)


def sampled(count, **changes):
    settings = {"temperature": 1.0, "max_tokens": 30, "ignore_eos": True, **changes}
    return [SamplingParams(seed=50 + i, **settings) for i in range(count)]


def test_temperature_0_is_greedy(engine, prompts):
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = answers_of(engine(), prompts, greedy)
    assert answers_of(engine("eagle", TYPICAL), prompts, greedy) == expected


def test_lower_limits_accept_more(engine, prompts):
    llm, taus = engine("eagle", TYPICAL), []
    for limits in (NEVER, {"typical_epsilon": 0.08}, {"typical_epsilon": 0.0}):
        before = counters(llm)
        outputs = answers_of(llm, prompts, sampled(16, extra_args=limits))
        taus.append(acceptance_length(llm, before))
        if limits is NEVER:  # all tokens are then drawn by the sampler, with the requests' seeds
            assert outputs == answers_of(engine(), prompts, sampled(16))
    assert 1.0 < taus[0] < taus[1] < taus[2]


def test_requests_bring_their_own_limits(engine, prompts):
    """In one batch: half of the requests accept nothing and equal plain decoding, the others do as the server says."""
    llm = engine("eagle", TYPICAL)
    params = [p for pair in zip(sampled(8, extra_args=NEVER), sampled(8), strict=True) for p in pair]
    outputs = answers_of(llm, prompts, params)
    expected = answers_of(engine(), prompts, [p for pair in zip(sampled(8), sampled(8), strict=True) for p in pair])
    assert outputs[::2] == expected[::2] and outputs[1::2] != expected[1::2]
    with pytest.raises(VLLMValidationError, match="typical_epsilon=2 is out of range"):
        llm.generate(prompts[:1], sampled(1, extra_args={"typical_epsilon": 2}), use_tqdm=False)
    with pytest.raises(VLLMValidationError, match="this server verifies drafts exactly"):
        engine("eagle").generate(prompts[:1], sampled(1, extra_args=NEVER), use_tqdm=False)


def test_what_else_shapes_the_distribution_is_verified_exactly(engine, prompts):
    kinds = [{"repetition_penalty": 1.3}, {"min_p": 0.1}, {"logit_bias": {7: 3.0}}, {"logprobs": 2}]
    kinds += [{"allowed_token_ids": list(range(10, 60))}, {"presence_penalty": 0.5, "top_p": 0.9}]
    params = [sampled(12, **kinds[i % len(kinds)])[i] for i in range(12)]
    expected = answers_of(engine(), prompts[:12], params)
    assert answers_of(engine("eagle", TYPICAL), prompts[:12], params) == expected


def test_custom_logits_processors_are_verified_exactly(engine, prompts):
    options = {"logits_processors": ["tests.doubles.processors:Avoid"]}
    params = sampled(8, extra_args={"avoid": 9})
    expected = answers_of(engine(**options), prompts[:8], params)
    assert answers_of(engine("eagle", TYPICAL, **options), prompts[:8], params) == expected


def test_accepted_paths_follow_the_formula(engine, checkpoints, prompts, tmp_path):
    """Every accepted path of an answer, recomputed with another implementation of the model and of the formula."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoints["target"], dtype=torch.float32).eval()
    trace, temperature, top_k, top_p = tmp_path / "trees.jsonl", 0.8, 50, 0.95
    llm = engine("eagle", {**TYPICAL, "trace_trees": str(trace)}, max_num_seqs=1)
    params = sampled(4, temperature=temperature, top_k=top_k, top_p=top_p)
    outputs = llm.generate(prompts[:4], params, use_tqdm=False)
    steps = {}
    for line in trace.read_text().splitlines():
        step = json.loads(line)
        steps.setdefault(step["request_id"].split("-")[0], []).append(step)

    def distribution(context):
        with torch.no_grad():
            logits = model(torch.tensor([context])).logits[0, -1] / temperature
        # As the host cuts: top_k first, then the smallest set of the likeliest whose mass reaches top_p.
        kept = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
        probs, order = kept.softmax(-1).sort(descending=True)
        kept[order[probs.cumsum(0) - probs >= top_p]] = float("-inf")
        return kept.softmax(-1).tolist()

    checked = accepted = 0
    for output in outputs:
        context = [*output.prompt_token_ids, output.outputs[0].token_ids[0]]
        for step in steps[output.request_id.split("-")[0]]:
            tokens, parents = step["token_ids"], step["parents"]
            assert tokens[0] == context[-1]
            histories = [context]
            for row in range(1, len(tokens)):
                histories.append([*histories[parents[row]], tokens[row]])
            probs = [distribution(history) for history in histories]
            path = expected_path(tokens, parents, probs, 0.09, 0.3)
            assert step["accepted_rows"][: len(path)] == path  # after it, the exact walk may have gone on
            checked, accepted = checked + 1, accepted + len(path) - 1
            end = len(context) - len(output.prompt_token_ids) + len(step["accepted_rows"])
            context = [*output.prompt_token_ids, *output.outputs[0].token_ids[:end]]
    assert checked > 30 and accepted > 10
