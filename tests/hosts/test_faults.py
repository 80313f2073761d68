"""EAGLE and Medusa drafters that fail in every way: the tokens stay plain decoding's, and the server lives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from vllm import SamplingParams

from tests.doubles import tiny
from tests.hosts.conftest import TREE, answers_of, make_prompts, runner_of
from vllm_specplug.core.guard import Guard
from vllm_specplug.cpu.drafters import levels
from vllm_specplug.proposers.eagle2.checkpoint import save_head
from vllm_specplug.proposers.medusa.heads import MedusaHeads
from vllm_specplug.types import Draft, TokenTree
from vllm_specplug.vllm.drafters import medusa as medusa_heads

MEDUSA = {"method": "medusa", "num_speculative_tokens": 8}


def with_tree(draft: Draft, **changes) -> Draft:
    return replace(draft, tree=replace(draft.tree, **changes))


def raising(draft: Draft) -> Draft:
    raise RuntimeError("out of luck")


def garbage_ids(draft: Draft) -> Draft:
    token_ids = draft.tree.token_ids.clone()
    token_ids[:, 1:] = 1 << 40
    return with_tree(draft, token_ids=token_ids)


def too_few_requests(draft: Draft) -> Draft:
    tree = draft.tree
    return Draft(
        TokenTree(tree.token_ids[1:], tree.parents[1:], tree.depths[1:], tree.num_rows[1:]), draft.log_values[1:]
    )


def nan_values(draft: Draft) -> Draft:
    return replace(draft, log_values=torch.full_like(draft.log_values, float("nan")))


FAULTS = (raising, garbage_ids, too_few_requests, nan_values)


def generate(llm):
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=24, ignore_eos=True) for i in range(6)]
    return answers_of(llm, make_prompts(6, seed=8), params)


@pytest.fixture(scope="module")
def engines(engine, checkpoints, tmp_path_factory):
    # Untrained heads: they guess what the LM head says of the last token, again and again.
    checkpoints["new medusa"] = tmp_path_factory.mktemp("heads") / "medusa"
    save_head(checkpoints["new medusa"], {}, MedusaHeads(3, 1, tiny.HIDDEN).checkpoint_state())
    return {"eagle2": engine("eagle", TREE), "medusa": engine("new medusa", MEDUSA), "plain": engine()}


@pytest.fixture(scope="module")
def expected(engines):
    return generate(engines["plain"])


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("method", ["eagle2", "medusa"])
def test_faulty_drafts(engines, expected, monkeypatch, method, fault):
    """Every other draft is faulty; each costs that step's draft."""
    module, name = {"eagle2": (levels, "grow_tree"), "medusa": (medusa_heads, "fill_tree")}[method]
    honest, calls = getattr(module, name), []

    def sometimes(*args, **kwargs):
        draft = honest(*args, **kwargs)
        calls.append(1)
        return fault(draft) if len(calls) % 2 else draft

    monkeypatch.setattr(module, name, sometimes)
    before = Guard.total_failures
    assert generate(engines[method]) == expected
    # ``too_few_requests`` leaves a draft of one request as it is, which is no fault.
    assert 1 <= Guard.total_failures - before <= (len(calls) + 1) // 2


@pytest.mark.parametrize("method", ["eagle2", "medusa"])
@pytest.mark.parametrize("wrong", ["nan", "infinite", "misshapen"])
def test_faulty_scores(engines, expected, monkeypatch, method, wrong):
    """The drafter's own numbers are wrong, all of the time."""
    proposer = engines[
        method
    ].llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.drafter
    calls = []

    def faulty(logits: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if wrong == "misshapen":
            return logits[:, :1]
        return torch.full_like(logits, float("nan" if wrong == "nan" else "inf"))

    if method == "medusa":
        honest = proposer.heads._logits
        monkeypatch.setattr(proposer.heads, "_logits", lambda hidden: faulty(honest(hidden)))
    else:
        compute = proposer.model.compute_logits
        monkeypatch.setattr(proposer.model, "compute_logits", lambda hidden: faulty(compute(hidden)))
    assert generate(engines[method]) == expected
    assert calls


def test_the_profile_run_calls_no_rejection_sampler_of_vllm(engines, monkeypatch):
    """On a CPU vLLM 0.30's fails."""
    runner = runner_of(engines["eagle2"])
    config = runner.speculative_config
    monkeypatch.setattr(runner, "rejection_sampler", lambda *_, **__: pytest.fail("it was called"))
    runner._dummy_sampler_run(torch.zeros(2, tiny.HIDDEN))
    assert runner.speculative_config is config
