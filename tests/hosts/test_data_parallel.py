"""Two data parallel replicas behind one API server and vLLM's own load balancer: plain decoding's tokens."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from vllm import SamplingParams

from tests.doubles.servers import metrics_page, post_json, running, tree_server
from tests.hosts.conftest import ENGINE, TREE, answers_of, make_prompts


@pytest.fixture(scope="module")
def server(checkpoints, tmp_path_factory):
    cores = sorted(os.sched_getaffinity(0))
    options = [
        *("--skip-tokenizer-init", "--dtype", ENGINE["dtype"], "--max-model-len", str(ENGINE["max_model_len"])),
        *("--max-num-seqs", "8", "--kv-cache-memory-bytes", str(ENGINE["kv_cache_memory_bytes"])),
        *("--data-parallel-size", "2"),
    ]
    speculative = {**TREE, "model": str(checkpoints["eagle"])}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
        patch.setenv("VLLM_CPU_SIM_MULTI_NUMA", "0")  # once set, vLLM 0.33 lets replicas share a NUMA node
        started = tree_server(checkpoints["target"], speculative, tmp_path_factory.mktemp("server") / "log", *options)
    with running(started):
        yield started


def complete(server, prompt: list[int], seed: int) -> list[int]:
    sampling = {"temperature": 0.8 * (seed % 2), "seed": seed, "ignore_eos": True, "return_token_ids": True}
    return post_json(server, "/v1/completions", prompt=prompt, max_tokens=40, **sampling)["choices"][0]["token_ids"]


@pytest.mark.wide
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two replicas need two cores")
def test_replicas_behind_one_server(engine, server):
    prompts = make_prompts(12, seed=7)
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=40, ignore_eos=True) for i in range(12)]
    expected = answers_of(engine(), prompts, params)
    with ThreadPoolExecutor(12) as pool:
        answers = pool.map(lambda i: complete(server, prompts[i]["prompt_token_ids"], i), range(12))
    assert [[answer] for answer in answers] == expected
    page = metrics_page(server)
    accepted = re.findall(r'^vllm:spec_decode_num_accepted_tokens_total\{engine="(\d)".* ([\d.]+)$', page, re.MULTILINE)
    assert sorted(replica for replica, count in accepted if float(count)) == ["0", "1"]
    drafts = re.findall(r"^vllm:spec_decode_num_drafts_total\{.* ([\d.]+)$", page, re.MULTILINE)
    (steps,) = re.findall(r"^specplug:steps_total ([\d.]+)$", page, re.MULTILINE)
    assert 0 < float(steps) <= sum(map(float, drafts))  # both replicas count; a step verifies several drafts
