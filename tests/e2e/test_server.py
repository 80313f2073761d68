"""Real HTTP requests against a real server with a draft tree."""

from __future__ import annotations

import json

import pytest

from tests.doubles.servers import metrics_page, post, post_json, running, tree_server

pytestmark = pytest.mark.smollm2

EAGLE2 = {"method": "eagle2", "model": "smollm2-135m-instruct", "budget": "fixed"}
OPTIONS = ("--dtype", "bfloat16", "--max-model-len", "512", "--kv-cache-memory-bytes", str(256 << 20))


@pytest.fixture(scope="module")
def server(smollm2, tmp_path_factory):
    with running(tree_server(smollm2, EAGLE2, tmp_path_factory.mktemp("server") / "log", *OPTIONS)) as (started,):
        yield started


CHAT = {"messages": [{"role": "user", "content": "Count from one to ten."}], "max_tokens": 40, "temperature": 0}


def test_chat_streamed_and_not(server):
    whole = post_json(server, "/v1/chat/completions", **CHAT)["choices"][0]["message"]["content"]
    assert len(whole) > 10
    streamed = ""
    with post(server, "/v1/chat/completions", **CHAT, stream=True) as response:
        for line in response:
            if line.startswith(b"data: {"):
                streamed += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    assert streamed == whole


def test_parameters_that_stock_speculation_refuses(server):
    body = {"prompt": "The sky is", "max_tokens": 8, "temperature": 1.0, "seed": 3}
    reply = post_json(server, "/v1/completions", **body, min_p=0.2, logit_bias={"100": 2.0}, n=2, logprobs=2)
    assert len(reply["choices"]) == 2
    assert len(reply["choices"][0]["logprobs"]["tokens"]) == reply["usage"]["completion_tokens"] // 2


def test_structured_output(server):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    body = {
        "messages": [{"role": "user", "content": "Invent a person."}],
        "max_tokens": 60,
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
    }
    person = json.loads(post_json(server, "/v1/chat/completions", **body)["choices"][0]["message"]["content"])
    assert person.keys() == {"name", "age"}


def test_metrics_count_accepted_nodes(server):
    post_json(server, "/v1/chat/completions", **CHAT)
    text = metrics_page(server)
    values = {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("vllm:spec_decode_num_") and "_created" not in line and "per_pos" not in line
    }
    assert values["vllm:spec_decode_num_accepted_tokens_total"] > 0


def test_bad_configuration_ends_before_the_server_starts(smollm2, tmp_path):
    process = tree_server(smollm2, {**EAGLE2, "draft_dept": 4}, tmp_path / "log", *OPTIONS).process
    assert process.wait(timeout=120) != 0
    assert "unknown key 'draft_dept'" in (tmp_path / "log").read_text()
