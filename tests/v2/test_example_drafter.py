"""The example of a drafter with weights (``tests/example_drafter``) on the V2 runner, and drafters that fail there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.doubles import tiny
from tests.doubles.installed import install
from tests.hosts.conftest import acceptance_length, runner_of
from tests.v2.conftest import ENGINE, answers, same
from vllm_specplug import proposer
from vllm_specplug.core.guard import Guard
from vllm_specplug.gpu.drafters import base
from vllm_specplug.utils.metrics import COUNTERS, Counters

EXAMPLE = Path(__file__).parents[1] / "example_drafter"


@pytest.fixture(scope="module")
def llm(engine, checkpoints, prompts, plain, tmp_path_factory):
    texts = [(one["prompt_token_ids"], out[0]) for one, out in zip(prompts, plain[0], strict=True)]
    checkpoints["linear"] = tiny.write_linear_heads(tmp_path_factory.mktemp("linear"), checkpoints["target"], texts)
    with pytest.MonkeyPatch.context() as patch:
        install(patch, EXAMPLE, tmp_path_factory.mktemp("site"))
        yield engine("linear", {"method": "linear_heads", "budget": "fixed"}, **ENGINE)
    proposer._registered.cache_clear()
    proposer.find_method.cache_clear()


def counted(llm) -> dict[str, float]:
    """The counters that a server shows at ``/metrics``."""
    values = Counters(llm.llm_engine.vllm_config.speculative_config.metrics_file).values()
    return {counter.reason or counter.name: value for counter, value in zip(COUNTERS, values, strict=True)}


def test_served_and_counted(llm, prompts, plain):
    assert same(answers(llm, prompts), plain)
    assert acceptance_length(llm) > 1.2
    found = counted(llm)
    assert found["specplug:steps"] >= 3 and found["proposer failed"] == 0
    assert found["specplug:draft_seconds"] > 0 and found["specplug:verify_seconds"] > 0


def raising(draft):
    raise RuntimeError("out of luck")


def misshapen(draft):
    return draft.tree.token_ids[:, 1:], draft.tree.parents[:, 1:]


def wrong_ids(draft):
    tree = draft.tree
    return tree.token_ids + torch.tensor([0, 1 << 40, -1 << 40, 7, 1]), tree.parents


def wrong_parents(draft):
    """Its own parent, a parent below, one far outside, and a node of a parent that is none."""
    return draft.tree.token_ids, draft.tree.parents * 0 + torch.tensor([-1, 1, 4, -9, 99])


def too_deep(draft):
    return draft.tree.token_ids, draft.tree.parents * 0 + torch.tensor([-1, 0, 1, 2, 3])


@pytest.mark.parametrize("fault", [raising, misshapen, wrong_ids, wrong_parents, too_deep])
def test_a_faulty_drafter_costs_speed_only(llm, prompts, plain, monkeypatch, fault):
    speculator, failures, before = runner_of(llm).speculator, Guard.total_failures, counted(llm)
    growth = speculator._growths[max(speculator.depths), False]
    honest, calls = growth._grow, []

    def sometimes(num_reqs, slots, roots, *inputs):
        token_ids, parents = honest(num_reqs, slots, roots, *inputs)
        calls.append(1)
        if len(calls) % 2:
            return token_ids, parents
        draft = proposer.as_draft(proposer.TokenTree(token_ids, parents, parents, slots))
        return fault(draft)

    monkeypatch.setattr(growth, "_grow", sometimes)
    assert same(answers(llm, prompts), plain)
    raised = len(calls) // 2 if fault in (raising, misshapen) else 0
    assert len(calls) > 3 and Guard.total_failures - failures == raised
    assert counted(llm)["proposer failed"] - before["proposer failed"] == raised


def test_with_several_ranks_a_fault_is_not_hidden(llm, monkeypatch):
    """The other ranks would verify their drafts, and this one none."""
    runner = runner_of(llm)
    for several in (True, False):
        monkeypatch.setattr(base, "several_ranks", lambda several=several: several)
        made = type(runner.speculator)(llm.llm_engine.vllm_config, runner.device, runner.req_states)
        assert made.guard.raises == several
