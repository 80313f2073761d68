"""Sessions with streamed input: the text of plain decoding in each turn."""

from __future__ import annotations

import pytest
from vllm import SamplingParams

from tests.doubles.sessions import run_sessions
from tests.hosts.conftest import make_prompts

GREEDY = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
#: Turns end by a stop token and by their length, inside accepted paths and at their ends.
PARAMS = [GREEDY, SamplingParams(temperature=0.7, seed=3, max_tokens=15, stop_token_ids=list(range(3, 20)))]


@pytest.fixture(scope="module")
def sessions():
    """Eight sessions of four turns; half of them repeat themselves."""
    inputs = [prompt["prompt_token_ids"][:12] for prompt in make_prompts(32, seed=4)]
    return [[tokens * (1 + 2 * (turn % 2)) for turn, tokens in enumerate(inputs[n::8])] for n in range(8)]


@pytest.mark.parametrize("method", ["eagle", "lookup"])
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "seeded"])
@pytest.mark.parametrize("at_once", [True, False])
def test_turns(engine, sessions, method, params, at_once, emitted):
    llm = engine("eagle") if method == "eagle" else engine(speculative_config={"method": "lookup", "budget": "fixed"})
    expected = run_sessions(engine(), sessions, params, at_once)
    assert run_sessions(llm, sessions, params, at_once) == expected
    assert sum(emitted) > 1.05 * len(emitted) > 15
