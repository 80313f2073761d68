"""A drafter reads prompts as key/value only, or runs in operators of its own: it drafts what vLLM's forwards draft."""

from __future__ import annotations

import json

import pytest
import torch
from vllm import SamplingParams

from tests.doubles import tiny
from vllm_specplug.proposers.eagle2.checkpoint import load_head, save_head

from .conftest import TREE, make_prompts, needs_bytes, runner_of, token_ids

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts():
    """One is longer than a step's 64 tokens: it is read in parts."""
    return make_prompts(5, seed=3, longest=60) + make_prompts(1, seed=4, longest=180)


def drafted(llm, prompts, monkeypatch, context, operator=None):
    """Answers, the draft of every round, and how many rows were written."""
    drafter, drafts, written = runner_of(llm).drafter, [], []
    honest = type(drafter)._end_growth

    def recorded(self, *args):
        drafts.append(honest(self, *args))
        return drafts[-1]

    with monkeypatch.context() as patch:
        patch.setattr(type(drafter), "_end_growth", recorded)
        patch.setattr(drafter, "context", context)
        patch.setattr(drafter, "operator", operator)
        if context is not None:
            write = context.write
            patch.setattr(context, "write", lambda ids, *rest: written.append(len(ids)) or write(ids, *rest))
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return token_ids(outputs), drafts, sum(written)


@pytest.fixture(scope="module")
def qwen3(checkpoints, tmp_path_factory):
    """A head with a Qwen3 layer: norms of queries and keys."""
    config = json.loads((checkpoints["eagle3"] / "config.json").read_text()) | {"model_type": "qwen3"}
    norms = {f"midlayer.self_attn.{name}_norm.weight": torch.rand(tiny.HEAD_DIM) + 0.5 for name in "qk"}
    checkpoints["qwen3"] = tmp_path_factory.mktemp("heads") / "qwen3"
    save_head(checkpoints["qwen3"], config, load_head(checkpoints["eagle3"])[1] | norms)


@pytest.mark.parametrize("drafter", ["eagle", "reduced", "eagle3", "qwen3"])
def test_drafts_are_those_of_whole_forwards(engine, prompts, qwen3, monkeypatch, drafter):
    llm = engine(drafter, enable_prefix_caching=False, max_num_batched_tokens=64)
    context = runner_of(llm).drafter.context
    answers, drafts, written = drafted(llm, prompts, monkeypatch, context)
    expected, whole, none = drafted(llm, prompts, monkeypatch, None)
    assert answers == expected and none == 0
    assert written > sum(len(prompt["prompt_token_ids"]) for prompt in prompts) / 2
    assert len(drafts) == len(whole)
    for ours, theirs in zip(drafts, whole, strict=True):
        torch.testing.assert_close(ours.log_values, theirs.log_values, rtol=1e-3, atol=1e-4)
        assert torch.equal(ours.tree.token_ids, theirs.tree.token_ids)


@pytest.mark.parametrize(
    ("drafter", "options"),
    [("eagle", {}), ("reduced", {}), pytest.param("reduced", {"draft_int8": True}, marks=needs_bytes)],
)
def test_drafts_of_the_operator_are_those_of_whole_forwards(engine, prompts, monkeypatch, drafter, options):
    """Prompts in parts, several requests at once; the prefix cache is off, so that both read the same rows."""
    llm = engine(drafter, {**TREE, **options}, enable_prefix_caching=False, max_num_batched_tokens=64)
    operator = runner_of(llm).drafter.operator
    assert operator is not None
    calls, first, grown, grow = [], operator.first, [], operator.grow
    monkeypatch.setattr(operator, "first", lambda *args: calls.append(args) or first(*args))
    monkeypatch.setattr(operator, "grow", lambda *args, **kwargs: grown.append(args) or grow(*args, **kwargs))
    answers, drafts, _ = drafted(llm, prompts, monkeypatch, None, operator)
    assert len(calls) == len(drafts)
    assert len(grown) == (len(drafts) if drafter == "reduced" else 0)  # "eagle" has the target's LM head
    expected, whole, _ = drafted(llm, prompts, monkeypatch, None)
    assert answers == expected and len(calls) == len(drafts) == len(whole)
    for ours, theirs in zip(drafts, whole, strict=True):
        torch.testing.assert_close(ours.log_values, theirs.log_values, rtol=1e-3, atol=1e-4)
        assert torch.equal(ours.tree.token_ids, theirs.tree.token_ids)


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("eagle3", {}),
        ("eagle", {"linear_rows": 0}),
    ],
)
def test_vllm_runs_what_the_operator_cannot(engine, drafter, options):
    assert runner_of(engine(drafter, {**TREE, **options})).drafter.operator is None


def test_what_is_not_written_is_missed(engine, prompts, monkeypatch):
    """The control."""
    llm = engine("eagle", enable_prefix_caching=False, max_num_batched_tokens=64)
    context = runner_of(llm).drafter.context
    _, drafts, _ = drafted(llm, prompts, monkeypatch, context)
    monkeypatch.setattr(context, "write", lambda *_: None)
    _, blind, _ = drafted(llm, prompts, monkeypatch, context)
    pairs = list(zip(drafts, blind, strict=False))
    assert not all(torch.equal(ours.tree.token_ids, theirs.tree.token_ids) for ours, theirs in pairs)


def test_own_tokens_are_drafted_beside_a_reduced_vocabulary(engine, monkeypatch):
    """Of one short text, so that few of the tokens that the drafter does not know are in it."""
    llm = engine("reduced", enable_prefix_caching=False, max_num_batched_tokens=64)
    drafter = runner_of(llm).drafter
    known = set(drafter._scorer.draft_ids.tolist())
    prompt = [token_id for token_id in range(3, tiny.VOCAB) if token_id not in known][:6]
    answers, drafts, _ = drafted(llm, [{"prompt_token_ids": prompt}], monkeypatch, drafter.context)
    tokens = {token_id for draft in drafts for token_id in draft.tree.token_ids[:, 1:].flatten().tolist()} - {-1}
    assert tokens & known and tokens - known
    own = {*prompt, *answers[0][0]}
    assert tokens - known <= own and len(own - known) < tiny.VOCAB - len(known)
