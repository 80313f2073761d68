"""Targets whose layers are in several KV cache groups, some with a sliding window, or of different shapes."""

from __future__ import annotations

import pytest
from vllm import SamplingParams
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from tests.doubles import tiny
from tests.hosts import test_attention_traits
from tests.hosts.conftest import (
    acceptance_length,
    answers_of,
    counters,
    drafts_after_pauses,
    make_prompts,
    runner_of,
    token_ids,
)
from tests.hosts.test_attention_traits import known, serve  # noqa: F401

#: Long enough for blocks of 32 tokens to be freed before the window.
GREEDY = SamplingParams(temperature=0, max_tokens=72, ignore_eos=True)
SEEDED = [SamplingParams(temperature=0.8, seed=seed, max_tokens=60, ignore_eos=True) for seed in range(8)]
WINDOW = 24
OWN = {"block_size": 32}


@pytest.fixture(scope="module")
def start(engine, checkpoints, tmp_path_factory):
    """``start(drafter=None, tree=None, **options)``: an engine of a target with windows in every second layer."""
    checkpoints["groups"] = tiny.write_target_with_windows(tmp_path_factory.mktemp("groups") / "target", WINDOW)
    return lambda drafter=None, tree=None, **more: engine(drafter, tree, target="groups", **{**OWN, **more})


@pytest.fixture(scope="module")
def plain(start, prompts):
    return answers_of(start(), prompts, GREEDY)


def test_same_as_plain(start, prompts, plain):
    llm = start("eagle")
    runner = runner_of(llm)
    groups = runner.kv_cache_config.kv_cache_groups
    assert len(groups) > 2 and runner.drafter.kv_cache_gid > 0
    assert any(isinstance(group.kv_cache_spec, SlidingWindowSpec) for group in groups)
    assert answers_of(llm, prompts, GREEDY) == plain
    assert acceptance_length(llm) > 1.3  # else trees would not have been exercised


def test_same_seed_same_tokens(start, prompts):
    expected = answers_of(start(), prompts[:8], SEEDED)
    assert answers_of(start("eagle"), prompts[:8], SEEDED) == expected


def test_prefix_cache_hits(start):
    """The block tables of windows then begin with blocks that do not exist.  vLLM keeps those of prompts only."""
    prompts = make_prompts(8, seed=2, longest=170)
    expected = answers_of(start(), prompts, GREEDY)
    llm = start("eagle")
    assert answers_of(llm, prompts, GREEDY) == expected
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert token_ids(outputs) == expected
    assert sum(output.num_cached_tokens for output in outputs) > 2 * 32


def test_forced_preemption_and_chunked_prefill(start, prompts, plain):
    llm = start("eagle", num_gpu_blocks_override=26, max_num_batched_tokens=48, enable_prefix_caching=False)
    assert answers_of(llm, prompts, GREEDY) == plain
    assert counters(llm)["preemptions"] > 0


def test_a_pause_in_drafting(start, prompts, plain, monkeypatch):
    """Rows that were missed are read into the blocks of the drafter's group."""
    llm = start("eagle", {"budget": "measured"}, enable_prefix_caching=False)
    answers, share = drafts_after_pauses(monkeypatch, llm, prompts, GREEDY)
    assert answers == plain and share > 0.98


@pytest.fixture(scope="module")
def odd_target(checkpoints, tmp_path_factory):
    """Windows in every second layer, of other KV heads and sizes than the full layers; tied, scaled embeddings."""
    path = tmp_path_factory.mktemp("shapes") / "target"
    full_layers = {f"{layer:02}": {"head_dim": 64, "num_key_value_heads": 4} for layer in (1, 3)}
    windows = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
    fields = {**windows, "per_layer_config": full_layers, "hidden_size_per_layer_input": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(test_attention_traits.TARGETS, "odd", ("Gemma4TextConfig", fields))
        checkpoints["odd"] = test_attention_traits.write_target(path, "odd")
    return path


@pytest.fixture(scope="module")
def learned_target(checkpoints, tmp_path_factory):
    """GPT-2: learned positions, and an embedding under another name that is the LM head too."""
    path = tmp_path_factory.mktemp("learned") / "target"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(test_attention_traits.TARGETS, "learned", ("GPT2Config", {"num_attention_heads": 2}))
        checkpoints["learned"] = test_attention_traits.write_target(path, "learned")
    return path


@pytest.mark.parametrize("hybrid", [True, False], ids=["groups", "one group"])
def test_layers_of_different_shapes(odd_target, serve, prompts, hybrid):  # noqa: F811
    expected, llm = serve(odd_target, prompts[:8], disable_hybrid_kv_cache_manager=not hybrid, **OWN)
    runner = runner_of(llm)
    shapes = {(alike.group, *alike.caches[0].shape[1:]) for alike in runner.alike_layers}
    assert len({heads for _, heads, _, _ in shapes}) == 2
    assert len({block_size for _, _, block_size, _ in shapes}) == (2 if hybrid else 1)
    assert len(runner.kv_cache_config.kv_cache_groups) == (2 if hybrid else 1)
    assert answers_of(llm, prompts[:8], test_attention_traits.GREEDY) == expected
    assert acceptance_length(llm) > 2.5


@pytest.mark.parametrize("name", ["odd", "learned"])
def test_a_drafter_finds_embedding_and_head(engine, odd_target, learned_target, prompts, name):
    expected = answers_of(engine(target=name, **OWN), prompts[:8], GREEDY)
    llm = engine("eagle", target=name, **OWN)
    drafter, target = runner_of(llm).drafter.model, runner_of(llm).model
    embedding = target.model.embed_tokens if name == "odd" else target.transformer.wte
    assert drafter.model.embed_tokens is embedding and drafter.lm_head.weight.data_ptr() == embedding.weight.data_ptr()
    assert answers_of(llm, prompts[:8], GREEDY) == expected
    assert counters(llm)["draft_tokens"] > 100


def test_learned_positions(learned_target, serve, prompts):  # noqa: F811
    expected, llm = serve(learned_target, prompts[:8], **OWN)
    assert answers_of(llm, prompts[:8], test_attention_traits.GREEDY) == expected
    assert acceptance_length(llm) > 2.5
