"""A proposer of another distribution, registered by entry point, served like ours."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
from vllm import LLM, SamplingParams

from tests.hosts.conftest import ENGINE, acceptance_length, make_prompts, token_ids
from vllm_specplug import proposer


@pytest.fixture
def parrot(monkeypatch):
    ours = proposer._registered()
    entry = EntryPoint(name="parrot", value="tests.doubles.parrot:PARROT", group=proposer.GROUP)
    monkeypatch.setattr(proposer, "_registered", lambda: {**ours, "parrot": entry})
    proposer.find_method.cache_clear()
    yield
    proposer.find_method.cache_clear()


def test_greedy_and_seeded_identity(engine, checkpoints, parrot):
    plain = engine()
    llm = LLM(str(checkpoints["target"]), speculative_config={"method": "parrot", "budget": "fixed"}, **ENGINE)
    engine.kept.append(llm)
    prompts = make_prompts(16)
    for temperature in (0.0, 0.8):
        params = [
            SamplingParams(temperature=temperature, seed=i, max_tokens=40, ignore_eos=True) for i in range(len(prompts))
        ]
        expected = token_ids(plain.generate(prompts, params, use_tqdm=False))
        assert token_ids(llm.generate(prompts, params, use_tqdm=False)) == expected
    assert acceptance_length(llm) > 1.0


def test_wrong_object_behind_the_entry_point(monkeypatch):
    entry = EntryPoint(name="odd", value="tests.doubles.parrot:PARROT", group=proposer.GROUP)
    monkeypatch.setattr(proposer, "_registered", lambda: {"odd": entry})
    proposer.find_method.cache_clear()
    with pytest.raises(TypeError, match="must be a Method named 'odd'"):
        proposer.find_method("odd")
    proposer.find_method.cache_clear()
