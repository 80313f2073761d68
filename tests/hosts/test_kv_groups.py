"""Targets whose layers are in several KV cache groups, some behind a sliding window, or of different shapes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from vllm import SamplingParams
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from tests.doubles import tiny
from tests.hosts.conftest import (
    acceptance_length,
    counters,
    drafts_after_pauses,
    make_prompts,
    runner_of,
    token_ids,
)

#: Long enough for blocks of 32 tokens to be freed behind the window.
GREEDY = SamplingParams(temperature=0, max_tokens=72, ignore_eos=True)
SEEDED = [SamplingParams(temperature=0.8, seed=seed, max_tokens=60, ignore_eos=True) for seed in range(8)]
WINDOW = 24
OWN = {"block_size": 32}


@pytest.fixture(scope="module")
def start(engine, checkpoints, tmp_path_factory):
    """``start(drafter=None, tree=None, **options)``: an engine of a target with windows in every second layer."""
    path = tiny.write_target(tmp_path_factory.mktemp("groups") / "target", num_layers=4)
    config = json.loads((path / "config.json").read_text())
    config |= {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
    (path / "config.json").write_text(json.dumps(config))
    checkpoints["groups"] = path
    return lambda drafter=None, tree=None, **more: engine(drafter, tree, target="groups", **{**OWN, **more})


@pytest.fixture(scope="module")
def prompts():
    return make_prompts(16)


@pytest.fixture(scope="module")
def plain(start, prompts):
    return token_ids(start().generate(prompts, GREEDY, use_tqdm=False))


def test_same_as_plain(start, prompts, plain):
    llm = start("eagle")
    runner = runner_of(llm)
    groups = runner.kv_cache_config.kv_cache_groups
    assert len(groups) > 2 and runner.drafter.kv_cache_gid > 0
    assert any(isinstance(group.kv_cache_spec, SlidingWindowSpec) for group in groups)
    assert token_ids(llm.generate(prompts, GREEDY, use_tqdm=False)) == plain
    assert acceptance_length(llm) > 1.3  # else trees would not have been exercised


def test_same_seed_same_tokens(start, prompts):
    expected = token_ids(start().generate(prompts[:8], SEEDED, use_tqdm=False))
    assert token_ids(start("eagle").generate(prompts[:8], SEEDED, use_tqdm=False)) == expected


def test_prefix_cache_hits(start):
    """The block tables of windows then begin with blocks that do not exist.  vLLM keeps those of prompts only."""
    prompts = make_prompts(8, seed=2, longest=170)
    expected = token_ids(start().generate(prompts, GREEDY, use_tqdm=False))
    llm = start("eagle")
    assert token_ids(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert token_ids(outputs) == expected
    assert sum(output.num_cached_tokens for output in outputs) > 2 * 32


def test_forced_preemption_and_chunked_prefill(start, prompts, plain):
    llm = start("eagle", num_gpu_blocks_override=26, max_num_batched_tokens=48, enable_prefix_caching=False)
    assert token_ids(llm.generate(prompts, GREEDY, use_tqdm=False)) == plain
    assert counters(llm)["preemptions"] > 0


def test_a_pause_in_drafting(start, prompts, plain, monkeypatch):
    """Rows that were missed are read into the blocks of the drafter's group."""
    llm = start("eagle", {"budget": "measured"}, enable_prefix_caching=False)
    answers, share = drafts_after_pauses(monkeypatch, llm, prompts, GREEDY)
    assert answers == plain and share > 0.98


def test_control_with_a_commit_into_another_group(start, prompts, plain, monkeypatch):
    llm = start("eagle", {"draft_depth": 4}, enable_prefix_caching=False)
    runner = runner_of(llm)
    count = len(runner.kv_cache_config.kv_cache_groups)
    moved = [replace(alike, group=(alike.group + 1) % count) for alike in runner.alike_layers]
    monkeypatch.setattr(runner, "alike_layers", moved)
    assert token_ids(llm.generate(prompts, GREEDY, use_tqdm=False)) != plain
