"""Lookup shares answers among requests of equal salts and adapters, and nothing else: a second client measures it."""

from __future__ import annotations

import itertools

import pytest
from vllm import SamplingParams

from tests.doubles.sessions import run_sessions
from tests.hosts.conftest import answers_of, counters, make_prompts, some

GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
ONE = SamplingParams(temperature=0, max_tokens=1)
#: Texts in each measurement.  Of known ones some 40 tokens each are accepted, of unknown ones some 10.
COUNT = 8
MOST_UNKNOWN, LEAST_KNOWN = 20 * COUNT, 30 * COUNT
_SEEDS = itertools.count(100)


class Client:
    """Asks for texts that plain decoding goes on with, and counts the accepted tokens."""

    def __init__(self, llm, plain):
        self.llm, self.plain = llm, plain

    def texts(self):
        """New beginnings, and how plain decoding goes on: nobody has written them yet."""
        prompts = make_prompts(99, next(_SEEDS))
        beginnings = [one["prompt_token_ids"][:20] for one in prompts if len(one["prompt_token_ids"]) > 20][:COUNT]
        given = [{"prompt_token_ids": tokens} for tokens in beginnings]
        return beginnings, [one[0] for one in answers_of(self.plain, given, GREEDY)]

    def accepted(self, beginnings, params=GREEDY, **prompt):
        """Accepted tokens of answers to these beginnings."""
        before = counters(self.llm)["accepted_tokens"]
        given = [{"prompt_token_ids": tokens, **prompt} for tokens in beginnings]
        self.llm.generate(given, params, use_tqdm=False)
        return counters(self.llm)["accepted_tokens"] - before


@pytest.fixture(params=some(["lookup", "union"], ["union"]))
def client(request, engine, checkpoints):
    plain = engine()
    eagle = {"method": "eagle2", "model": str(checkpoints["eagle"])}
    config = {
        "lookup": {"method": "lookup", "budget": "fixed"},
        "union": {"method": "union", "sources": [eagle, {"method": "lookup"}], "budget": "fixed"},
    }[request.param]
    return Client(engine(speculative_config=config), plain)


def test_answers_are_shared_and_inputs_are_not(client):
    """The inputs are a prompt, prompts that grow by their answers, as beams do, and the second input of a session,
    which waits for its turn or comes after it."""
    assert client.accepted(client.texts()[0]) < MOST_UNKNOWN
    beginnings, _ = client.texts()
    client.accepted(beginnings)
    assert client.accepted(beginnings) > LEAST_KNOWN
    for way in ("prompt", "beams", "waiting", "late"):
        beginnings, secrets = client.texts()
        whole = [begin + secret for begin, secret in zip(beginnings, secrets, strict=True)]
        if way == "prompt":
            client.accepted(whole, SHORT)
        elif way == "beams":
            client.accepted([text[:count] for text in whole for count in range(20, 68, 3)], ONE)
        else:
            run_sessions(client.llm, [[[5] * 9, text, [6] * 9] for text in whole], SHORT, way == "waiting")
        assert client.accepted(beginnings) < MOST_UNKNOWN, way


def test_the_end_of_a_prompt_is_not_shared(client):
    unknown = client.accepted(client.texts()[0], SHORT)
    beginnings, secrets = client.texts()
    client.accepted([begin[-8:] + secret[:8] for begin, secret in zip(beginnings, secrets, strict=True)], SHORT)
    assert client.accepted(beginnings, SHORT) < unknown + 2 * COUNT  # of 8 each


def test_answers_of_a_session_are_shared(client):
    beginnings, secrets = client.texts()
    answers = run_sessions(client.llm, [[tokens, [5] * 9, [6] * 9] for tokens in beginnings], GREEDY)
    assert [turns[0] for turns in answers] == secrets
    assert client.accepted(beginnings) > LEAST_KNOWN


def test_salts(client):
    """Texts are shared among requests of equal salts, as prefix caches are."""
    for salt in ("a", None):
        beginnings, _ = client.texts()
        client.accepted(beginnings, cache_salt=salt)
        for other in {"a", "b", None} - {salt}:
            assert client.accepted(beginnings, cache_salt=other) < MOST_UNKNOWN
        assert client.accepted(beginnings, cache_salt=salt) > LEAST_KNOWN
