"""A proposer of another distribution, registered by entry point, served like ours: the example of docs/proposers.md."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from vllm import LLM, SamplingParams

from tests.hosts.conftest import ENGINE, acceptance_length, answers_of, make_prompts
from vllm_specplug import proposer

PAGE = Path(__file__).parents[2] / "docs" / "proposers.md"


def register(monkeypatch, name, value):
    registered = {**proposer._registered(), name: EntryPoint(name=name, value=value, group=proposer.GROUP)}
    monkeypatch.setattr(proposer, "_registered", lambda: registered)
    proposer.find_method.cache_clear()


@pytest.fixture
def echo(monkeypatch, tmp_path):
    """The page's example as an installed package."""
    code = PAGE.read_text().split("<!-- example -->\n```python\n")[1].split("```\n<!-- /example -->")[0]
    assert len(code.splitlines()) < 60
    (tmp_path / "my_package.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    register(monkeypatch, "echo", "my_package:METHOD")
    yield
    proposer.find_method.cache_clear()
    sys.modules.pop("my_package")


def test_greedy_and_seeded_identity(engine, checkpoints, echo):
    plain = engine()
    llm = LLM(str(checkpoints["target"]), speculative_config={"method": "echo", "budget": "fixed"}, **ENGINE)
    engine.kept.append(llm)
    prompts = make_prompts(16)
    for temperature in (0.0, 0.8):
        params = [
            SamplingParams(temperature=temperature, seed=i, max_tokens=40, ignore_eos=True) for i in range(len(prompts))
        ]
        expected = answers_of(plain, prompts, params)
        assert answers_of(llm, prompts, params) == expected
    assert acceptance_length(llm) > 1.0


def test_wrong_object_behind_the_entry_point(monkeypatch):
    register(monkeypatch, "odd", "vllm_specplug.proposers.lookup:METHOD")
    with pytest.raises(TypeError, match="must be a .*Method named 'odd'"):
        proposer.find_method("odd")
    proposer.find_method.cache_clear()
