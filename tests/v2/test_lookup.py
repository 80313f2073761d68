"""Lookup on the V2 model runner: the tokens of plain decoding, and the trees that the host would draft."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from vllm import SamplingParams

from tests.doubles.constants import constants_of
from tests.doubles.contexts import context
from tests.doubles.oracle_tensors import to_rows
from tests.doubles.sessions import run_sessions
from tests.hosts.conftest import runner_of, some
from tests.v2.conftest import (
    ENGINE,
    GREEDY,
    PLAIN,
    SAMPLED,
    SCARCE,
    answers,
    check_greedy,
    check_preemption,
    check_prefix_cache_hits,
    first,
    same,
    watch_rounds,
)
from vllm_specplug.core.tree import from_flat
from vllm_specplug.gpu.drafters.model_free import ModelFreeSpeculator
from vllm_specplug.gpu.scheduler import AsyncTreeScheduler
from vllm_specplug.proposers.lookup.drafting import LookupProposer
from vllm_specplug.proposers.lookup.index import BREAK, TrafficIndex
from vllm_specplug.proposers.lookup.matches import LONG_ANCHOR
from vllm_specplug.proposers.lookup.options import LookupOptions

PROVEN = True
#: Of ended requests the tests below would find answers.
SOURCE = {"method": "lookup", "num_speculative_tokens": 12, "draft_depth": 6, "traffic_tokens": 0}
LOOKUP = {**SOURCE, "budget": "fixed"}


#: Unlike other tests' engines: an engine's buffers have the size that ``max_candidates`` had at their first use.
OWN = {**ENGINE, "max_logprobs": 21}


@pytest.fixture(scope="module", autouse=True)
def candidates():
    """Enough for all matches of these contexts: of more, the host keeps the newest, the device the longest."""
    with constants_of(LookupOptions, max_candidates=32):
        yield


@pytest.fixture(scope="module")
def repeating(prompts):
    """Prompts that repeat what plain decoding went on with."""
    return [{"prompt_token_ids": prompt["prompt_token_ids"][:9] * 3} for prompt in prompts]


@pytest.fixture(scope="module")
def expected(plainly, repeating):
    return plainly(repeating)


@pytest.fixture(scope="module")
def llm(engine, expected):  # the newest engine owns the host's counters
    return engine(speculative_config=LOOKUP, **OWN)


def trees_of(llm, monkeypatch):
    """The list gets an entry for each tree drafted from now on: slot, the request's tokens, what was learned by then,
    and the tree as rows."""
    speculator, drafted = runner_of(llm).speculator, []
    largest = (max(speculator.depths), False)
    honest = speculator._growths[largest]

    @functools.wraps(honest)  # with its attributes
    def look(num_reqs, slots, roots, *inputs):
        token_ids, parents = honest(num_reqs, slots, roots, *inputs)
        states, weights = speculator._req_states, speculator._proposer.learner.calibration.weights.copy()
        num_rows = 1 + (parents >= 0).sum(dim=1)
        tree = from_flat(token_ids, parents, num_rows)
        for request, slot in enumerate(slots.tolist()):
            known = states.all_token_ids.gpu[slot, : states.total_len.gpu[slot]].tolist()
            drafted.append((slot, known, weights, to_rows(tree, request)))
        return token_ids, parents

    monkeypatch.setitem(speculator._growths, largest, look)
    return drafted


@pytest.mark.interpreted
def test_greedy(llm, repeating, expected, monkeypatch):
    check_greedy(llm, ModelFreeSpeculator, repeating, expected, 1.3, monkeypatch)


def test_trees_are_those_of_the_host(llm, repeating, monkeypatch):
    drafted = trees_of(llm, monkeypatch)
    found, _ = answers(llm, repeating)
    texts = [prompt["prompt_token_ids"] + answer[0] for prompt, answer in zip(repeating, found, strict=True)]
    options = runner_of(llm).speculator._proposer._options
    assert len(drafted) > 10 and max(len(rows) for *_, rows in drafted) == 13
    for _, known, weights, rows in drafted:
        # A last step may emit more than was asked for.
        assert any(known[: len(text)] == text[: len(known)] for text in texts)
        proposer = LookupProposer(replace(options, min_node_value=0.0, traffic_tokens=0))
        proposer.calibration.weights[:] = weights
        assert rows == to_rows(proposer.propose(context([known], max_len=256)).tree, 0)


def test_same_seed_same_tokens(llm, repeating, plainly):
    assert same(answers(llm, repeating, SAMPLED), plainly(repeating, SAMPLED))


def test_prefix_cache_hits_on_blocks_written_by_trees(llm, repeating, plainly):
    check_prefix_cache_hits(plainly, llm, repeating)


def test_forced_preemption_and_chunked_prefill(engine, repeating, expected):
    check_preemption(engine(speculative_config=LOOKUP, **{**SCARCE, "max_logprobs": 21}), repeating, expected)


@pytest.mark.wide
@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is the default")
def test_asynchronous_scheduling(engine, repeating, expected, sessions, asynchronous):
    turns = run_sessions(engine(**PLAIN), sessions, SHORT)
    llm = engine(speculative_config={**LOOKUP, "num_speculative_tokens": 6}, **OWN)
    assert isinstance(llm.llm_engine.engine_core.engine_core.scheduler, AsyncTreeScheduler)
    assert same(answers(llm, repeating), expected)
    assert run_sessions(llm, sessions, SHORT) == turns


@pytest.mark.wide
def test_cuda_graphs(graph_engine, repeating, expected):
    """Verification and the search from recorded graphs."""
    llm = graph_engine(speculative_config=LOOKUP, async_scheduling=True, max_num_seqs=3, **OWN)
    assert same(answers(llm, repeating), expected)


# ---- answers of other requests


@pytest.fixture(scope="module")
def remembers(engine, expected):
    return engine(speculative_config={**LOOKUP, "traffic_tokens": 1024}, **OWN)


def test_answers_of_ended_requests_are_drafted(remembers, prompts, plain, monkeypatch):
    """Asked again, the same prompts take few steps.  The ring holds what V1 would store."""
    proposer, stored = runner_of(remembers).speculator._proposer, []
    honest = proposer.finish

    def finish(ended):
        stored.append((ended.token_ids[ended.slot, : ended.end].clone(), ended.prompt_len))
        honest(ended)

    monkeypatch.setattr(proposer, "finish", finish)
    rounds = watch_rounds(remembers, monkeypatch)
    steps = []
    for _ in range(2):
        rounds.clear()
        assert same(answers(remembers, prompts), plain)
        steps.append(len(rounds))
    assert steps[1] < 0.6 * steps[0]
    silent = GREEDY.clone()
    silent.extra_args = {"speculation": False}
    for params in (silent, GREEDY):  # ended requests are reported with the next step
        answers(remembers, prompts[:1], params)
    assert len(stored) == 2 * len(prompts)
    ring = TrafficIndex(1024, LONG_ANCHOR)
    for tokens, prompt_len in stored:
        known = next(p for p in prompts if p["prompt_token_ids"] == tokens[:prompt_len].tolist())
        answer = plain[0][prompts.index(known)][0]
        assert tokens[prompt_len:].tolist() == answer, "tokens after the answer's end"
        ring.add(tokens[prompt_len:].numpy(force=True))
    assert proposer._buffers.traffic.tolist() == ring.tokens.tolist()


def test_salts(remembers, prompts, plain, monkeypatch):
    """Answers are drafted for requests of the same salt only."""
    rounds, steps = watch_rounds(remembers, monkeypatch), []
    for salt in ("a", "b", "a"):
        rounds.clear()
        assert same(answers(remembers, [{**prompts[0], "cache_salt": salt}]), first(plain, 1))
        steps.append(len(rounds))
    assert steps[2] < 0.6 * steps[1] and steps[1] > 0.9 * steps[0]


SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def sessions(repeating):
    """Turns that end inside accepted paths."""
    inputs = [one["prompt_token_ids"] for one in repeating]
    return [[inputs[n], inputs[n][:9], inputs[n - 1][:9]] for n in range(3)]


@pytest.mark.parametrize("at_once", some([True, False], [True]))
def test_sessions(remembers, engine, sessions, at_once):
    """The text of plain decoding in each turn; the ring gets their answers, and no input."""
    expected = run_sessions(engine(**PLAIN), sessions, SHORT, at_once)
    (first,), _ = answers(remembers, [{"prompt_token_ids": [3, 4]}], SHORT)  # makes the buffers
    buffers = runner_of(remembers).speculator._proposer._buffers
    with torch.inference_mode():
        buffers.traffic.fill_(BREAK)
    assert run_sessions(remembers, sessions, SHORT, at_once) == expected
    answers(remembers, [{"prompt_token_ids": [3, 4]}], SHORT)  # ended requests are reported with the next step
    kept = "".join(f" {token}" for token in buffers.traffic.tolist()).split(f" {BREAK}")
    known = [*first, *(turn for turns in expected for turn in turns)]
    # A last step may emit more than was asked for: that is left out.
    assert sorted(filter(None, kept)) == sorted("".join(f" {token}" for token in turn) for turn in known)


def test_control_without_traffic(llm, prompts, plain, monkeypatch):
    rounds, steps = watch_rounds(llm, monkeypatch), []
    for _ in range(2):
        rounds.clear()
        assert same(answers(llm, prompts[:1]), first(plain, 1))
        steps.append(len(rounds))
    assert steps[1] > 0.9 * steps[0]
