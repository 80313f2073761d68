"""LoRA adapters loaded over HTTP into a running server with trees; the target is tiny."""

from __future__ import annotations

import json

import pytest

from tests.doubles import tiny
from tests.doubles.adapters import write_adapter
from tests.doubles.servers import post, post_json, running
from vllm_specplug.cli.server_process import Server

OPTIONS = [
    *("--dtype", "float32", "--max-model-len", "256", "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)),
    *("--enable-lora", "--max-loras", "3", "--max-lora-rank", "8"),
]
PROMPT = list(range(20, 60))


def complete(server, model):
    body = {"prompt": PROMPT, "max_tokens": 32, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return post_json(server, "/v1/completions", model=model, **body)["choices"][0]["token_ids"]


@pytest.fixture
def servers(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    target, eagle = tiny.write_target(tmp_path / "target"), tiny.write_drafter(tmp_path / "eagle")
    tiny.write_tokenizer(target)
    method = {"method": "eagle2", "model": str(eagle), "budget": "fixed", "min_node_value": 0.0}
    options = {"plain": [], "trees": ["--speculative-config", json.dumps({**method, "num_speculative_tokens": 12})]}
    started = [
        Server(name, target, [*OPTIONS, *more], tmp_path / f"{name}.log", plugins=bool(more))
        for name, more in options.items()
    ]
    with running(*started):
        yield started


def test_adapters_come_and_go(servers, tmp_path):
    paths = {name: str(write_adapter(tmp_path / name, seed)) for seed, name in enumerate(("first", "second"), start=1)}
    answers = []
    for server in servers:
        seen = [complete(server, "demo")]
        for name, path in paths.items():
            post(server, "/v1/load_lora_adapter", lora_name=name, lora_path=path).close()
            seen += [complete(server, name), complete(server, "demo")]
        post(server, "/v1/unload_lora_adapter", lora_name="first").close()
        answers.append([*seen, complete(server, "second")])
    plain, trees = answers
    assert plain[0] == plain[2] and plain[0] != plain[1] != plain[3]
    assert trees == plain
    assert servers[1].draft_counters()[0] > 0
