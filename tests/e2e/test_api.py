"""The host's HTTP API with real requests: a server with draft trees answers as the plain one does.

Both serve the tiny random model in float32; the one with trees has little KV space.
"""

from __future__ import annotations

import json
import urllib.request

import pytest

from tests import tiny
from vllm_specplug.demo import Server, wait_until_ready

TREE = {
    "method": "eagle2",
    "num_speculative_tokens": 8,
    "draft_depth": 4,
    "min_node_value": 0.0,
    "min_level_value": 0.0,
}
SETTINGS = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 11},
    "n": {"temperature": 0.9, "seed": 12, "n": 3},
    "min_p, penalties, bias": {
        "temperature": 0.9, "seed": 13, "min_p": 0.05, "presence_penalty": 0.5, "logit_bias": {"40": 2.0}
    },
    "stop": {"temperature": 0.9, "seed": 14, "stop": ["a", "7"]},
}  # fmt: skip


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> dict[str, Server]:
    root = tmp_path_factory.mktemp("api")
    target = tiny.write_target(root / "target")
    tiny.write_tokenizer(target)
    speculative = json.dumps({**TREE, "model": str(tiny.write_drafter(root / "eagle"))})
    common = ["--dtype", "float32", "--max-model-len", "256", "--enforce-eager"]
    kv = ["--kv-cache-memory-bytes", "552960", "--block-size", "32"]  # 360 tokens
    started: dict[str, Server] = {}
    # Each server would bind itself to the same cores.
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        environment.setenv("OMP_NUM_THREADS", "1")
        started |= start_pair(target, speculative, common, kv, root)
    try:
        wait_until_ready(list(started.values()), 900)
        yield started
    finally:
        for server in started.values():
            server.stop()


def start_pair(target, speculative: str, common: list[str], kv: list[str], root) -> dict[str, Server]:
    return {
        "trees": Server(
            "trees", target, ["--speculative-config", speculative, *common, *kv], root / "trees.log", plugins=True
        ),
        "plain": Server("plain", target, common, root / "plain.log", plugins=False),
    }


def post(server: Server, path: str, **body) -> urllib.request.Request:
    request = urllib.request.Request(
        server.url + path, json.dumps({"model": "demo", **body}).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=120)


def ask(server: Server, path: str, **body) -> list[dict]:
    """The choices of a reply, or the texts of a streamed one."""
    if not body.get("stream"):
        return json.load(post(server, path, **body))["choices"]
    texts: dict[int, list] = {}
    with post(server, path, **body) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                    found = texts.setdefault(choice["index"], ["", None])
                    found[0] += text
                    found[1] = choice.get("finish_reason") or found[1]
    return [dict(zip(("text", "finish_reason"), texts[index], strict=True)) for index in sorted(texts)]


def prompt_of(path: str, text: str = "count the green lights, then tell a story") -> dict:
    return {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_whole_and_streamed(servers, path, settings):
    body = {**prompt_of(path), **SETTINGS[settings], "max_tokens": 40}
    whole = [ask(servers[name], path, **body) for name in ("trees", "plain")]
    assert whole[0] == whole[1]
    texts = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in whole[0]]
    assert len(texts) == body.get("n", 1) and all(texts)
    streamed = ask(servers["trees"], path, **body, stream=True)
    assert [choice["text"] for choice in streamed] == texts
    assert [choice["finish_reason"] for choice in streamed] == [choice["finish_reason"] for choice in whole[0]]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_logprobs(servers, path):
    wanted = {"logprobs": 3} if path == "/v1/completions" else {"logprobs": True, "top_logprobs": 3}
    body = {**prompt_of(path), **wanted, "max_tokens": 20, "temperature": 0.8, "seed": 4}
    found, expected = (ask(servers[name], path, **body)[0]["logprobs"] for name in ("trees", "plain"))
    assert list(numbers(found)) == pytest.approx(list(numbers(expected)), abs=1e-4)
    assert len(list(numbers(found))) > 60


def numbers(value):
    """All numbers in a JSON value, in order."""
    if isinstance(value, dict):
        for key in value:
            yield from numbers(value[key])
    elif isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, int | float):
        yield value
