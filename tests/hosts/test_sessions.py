"""Sessions with streamed input: the text of plain decoding in each turn."""

from __future__ import annotations

import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler

from tests.doubles import tiny
from tests.doubles.sessions import run_sessions
from tests.hosts.conftest import MEDUSA, make_prompts
from vllm_specplug.proposers.eagle2.checkpoint import save_head
from vllm_specplug.proposers.medusa.heads import MedusaHeads

GREEDY = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
#: Turns end by a stop token and by their length, inside accepted paths and at their ends.
PARAMS = [GREEDY, SamplingParams(temperature=0.7, seed=3, max_tokens=15, stop_token_ids=list(range(3, 20)))]


@pytest.fixture(scope="module")
def sessions():
    """Eight sessions of four turns; half of them repeat themselves."""
    inputs = [prompt["prompt_token_ids"][:12] for prompt in make_prompts(32, seed=4)]
    return [[tokens * (1 + 2 * (turn % 2)) for turn, tokens in enumerate(inputs[n::8])] for n in range(8)]


@pytest.fixture(scope="module")
def start(engine, checkpoints, tmp_path_factory):
    """``start(method)``: a plain engine, and one with the method."""
    # Untrained heads: they guess what the LM head says of the last token, again and again.
    checkpoints["new medusa"] = tmp_path_factory.mktemp("heads") / "medusa"
    save_head(checkpoints["new medusa"], {}, MedusaHeads(3, 1, tiny.HIDDEN).checkpoint_state())
    sources = [{"method": "eagle2", "model": str(checkpoints["eagle"])}, {"method": "lookup"}]
    engines = {
        "eagle": ("eagle",),
        "medusa": ("new medusa", MEDUSA),
        "union": {"method": "union", "sources": sources, "budget": "fixed"},
    }

    def make(method):
        found = engines[method]
        return engine(), engine(*found) if isinstance(found, tuple) else engine(speculative_config=found)

    return make


ALL = ["eagle", "medusa", "union"]
CASES = [(method, params, True) for method in ALL for params in PARAMS]
CASES += [(method, params, False) for method in ("eagle", "union") for params in PARAMS]


@pytest.fixture
def inputs_seen(monkeypatch):
    """When an input joins its session, all tokens of the turn but the last one are computed, and nothing is drafted."""
    honest, seen = Scheduler._update_request_as_session, []

    def watched(self, session, update):
        seen.append((session.num_tokens - session.num_computed_tokens, session.spec_token_ids))
        honest(self, session, update)

    monkeypatch.setattr(Scheduler, "_update_request_as_session", watched)
    yield
    assert seen and all(one == (1, []) for one in seen)


@pytest.mark.usefixtures("inputs_seen")
@pytest.mark.parametrize(("method", "params", "at_once"), CASES)
def test_turns(start, sessions, method, params, at_once, emitted):
    """Inputs wait for the turns before them, or are sent when these have ended."""
    plain, llm = start(method)
    expected = run_sessions(plain, sessions, params, at_once)
    assert run_sessions(llm, sessions, params, at_once) == expected
    assert sum(emitted) > len(emitted) > 15  # else no turn would have ended inside an accepted path
