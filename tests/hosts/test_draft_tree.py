"""Trees from a small model: the tokens are those of plain vLLM, and drafts are accepted."""

from __future__ import annotations

import pytest
from vllm import SamplingParams

from tests.doubles import tiny
from tests.hosts.conftest import (
    SEEDED,
    WHOLE,
    acceptance_length,
    check_prefix_cache_hits,
    counters,
    drafts_after_pauses,
    make_prompts,
    runner_of,
    token_ids,
)
from tests.hosts.test_architectures import PARAMS, PROMPTS
from vllm_specplug.config import ConfigError

TREE = {"method": "draft_tree", "num_speculative_tokens": 12, "draft_depth": 4, "draft_top_k": 3, **WHOLE}
LONG = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
SETTINGS = {"block_size": 32, "kv_cache_memory_bytes": 8 << 20}


@pytest.fixture(scope="module")
def small(checkpoints, tmp_path_factory) -> str:
    """The target's own layers but the last, with a head of their own: it is often right."""
    checkpoints["small"] = tiny.write_sibling(tmp_path_factory.mktemp("sibling") / "small", checkpoints["target"])
    return "small"


def check_as_plain(engine, drafter, tree):
    """Greedy and seeded; too few KV blocks, chunked prefill, then prompts that continue answers.  Returns tau."""
    plain = engine(**SETTINGS)
    expected = token_ids(plain.generate(PROMPTS, PARAMS, use_tqdm=False))
    llm = engine(drafter, tree, num_gpu_blocks_override=12, max_num_batched_tokens=64, **SETTINGS)
    assert token_ids(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
    tau = acceptance_length(llm)
    assert counters(llm)["preemptions"] > 0
    assert runner_of(llm).drafter.draft_layers
    prompts = make_prompts(4)
    expected = token_ids(plain.generate(prompts, SEEDED, use_tqdm=False))
    assert token_ids(llm.generate(prompts, SEEDED, use_tqdm=False)) == expected
    check_prefix_cache_hits(plain, llm, PROMPTS[:2])
    return tau


def test_same_as_plain(engine, small):
    assert check_as_plain(engine, small, TREE) > 1.5


def test_a_tree_accepts_more_than_vllms_chain(engine, checkpoints, small):
    """The same drafter, and the same number of verified tokens."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    chain = {"method": "draft_model", "model": str(checkpoints[small]), "num_speculative_tokens": 4}
    stock = engine(speculative_config=chain, **SETTINGS)
    expected = token_ids(stock.generate(PROMPTS, params, use_tqdm=False))
    llm = engine(small, {**TREE, "num_speculative_tokens": 4}, **SETTINGS)
    assert token_ids(llm.generate(PROMPTS, params, use_tqdm=False)) == expected
    assert acceptance_length(llm) >= acceptance_length(stock) > 1.2


def test_a_union_with_a_measured_budget(engine, checkpoints, tmp_path, monkeypatch):
    """The drafter's vocabulary is padded and it knows few positions; the budget times its forwards, and it pauses."""
    checkpoints["named"] = tiny.write_target(tmp_path / "named")
    padded = tiny.write_sibling(
        tmp_path / "padded", checkpoints["named"], vocab_size=tiny.VOCAB + 32, max_position_embeddings=96
    )
    for folder in (checkpoints["named"], padded):
        tiny.write_tokenizer(folder)
    plain = engine(target="named", **SETTINGS)
    expected = token_ids(plain.generate(PROMPTS, PARAMS, use_tqdm=False))
    sources = [{"method": "draft_tree", "model": str(padded)}, {"method": "lookup"}]
    union = {"method": "union", "sources": sources, "budget": "measured", "num_speculative_tokens": 12}
    llm = engine(target="named", speculative_config=union, **SETTINGS)
    assert token_ids(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
    answers, share = drafts_after_pauses(monkeypatch, llm, PROMPTS, LONG)
    assert answers == token_ids(plain.generate(PROMPTS, LONG, use_tqdm=False)) and share == 1


def test_a_drafter_with_other_token_ids(engine, checkpoints, tmp_path, caplog):
    """The tokens are matched by their text; two are missing."""
    checkpoints["named"] = tiny.write_target(tmp_path / "named")
    checkpoints["renumbered"] = tiny.write_sibling(tmp_path / "renumbered", checkpoints["named"])
    for folder in (checkpoints["named"], checkpoints["renumbered"]):
        tiny.write_tokenizer(folder)
    tiny.renumber(checkpoints["renumbered"], lost=("e", "true"))
    expected = token_ids(engine(**SETTINGS).generate(PROMPTS, PARAMS, use_tqdm=False))
    llm = engine("renumbered", TREE, target="named", num_gpu_blocks_override=12, max_num_batched_tokens=64, **SETTINGS)
    assert "drafts the 158 tokens that have the same text in both" in caplog.text
    assert token_ids(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
    assert counters(llm)["preemptions"] > 0
    assert acceptance_length(llm) > 1.5


def test_a_drafter_with_windows_in_some_layers(engine, checkpoints, tmp_path):
    checkpoints["windows"] = tiny.write_target_with_windows(tmp_path / "windows", 16)
    with pytest.raises(ConfigError, match="--disable-hybrid-kv-cache-manager"):
        engine("windows", TREE, **SETTINGS)
    llm = engine("windows", TREE, disable_hybrid_kv_cache_manager=True, **SETTINGS)
    expected = token_ids(engine(**SETTINGS).generate(PROMPTS, PARAMS, use_tqdm=False))
    assert token_ids(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
