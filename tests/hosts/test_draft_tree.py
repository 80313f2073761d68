"""Trees from a small model: the tokens are those of plain vLLM, and drafts are accepted."""

from __future__ import annotations

import pytest

from tests.doubles import tiny
from tests.hosts.conftest import (
    SEEDED,
    WHOLE,
    acceptance_length,
    answers_of,
    check_prefix_cache_hits,
    drafts_after_pauses,
    make_prompts,
    runner_of,
)
from tests.hosts.same_as_plain import LONG, PARAMS, PROMPTS, SCARCE, SETTINGS, check_against_chain, check_as_plain
from vllm_specplug.config import ConfigError

TREE = {"method": "draft_tree", "num_speculative_tokens": 12, "draft_depth": 4, "draft_top_k": 3, **WHOLE}


@pytest.fixture(scope="module")
def small(checkpoints, tmp_path_factory) -> str:
    """The target's own layers but the last, with a head of their own: it is often right."""
    checkpoints["small"] = tiny.write_sibling(tmp_path_factory.mktemp("sibling") / "small", checkpoints["target"])
    return "small"


def check_further(plain, llm):
    """All seeded, then prompts that continue answers."""
    assert runner_of(llm).drafter.draft_layers
    prompts = make_prompts(4)
    assert answers_of(llm, prompts, SEEDED) == answers_of(plain, prompts, SEEDED)
    check_prefix_cache_hits(plain, llm, PROMPTS[:2])


def check_compiled(engine, drafter, tree, target="target"):
    """Compiled target and drafter: the tokens of the plain target that is not compiled, and drafts are accepted."""
    expected = answers_of(engine(target=target, **SETTINGS), PROMPTS, PARAMS)
    tree = {"tree": tree} if drafter else {"speculative_config": tree}
    llm = engine(drafter, target=target, enforce_eager=False, **tree, **SETTINGS)
    assert answers_of(llm, PROMPTS, PARAMS) == expected
    assert acceptance_length(llm) > 1.2


def test_same_as_plain(engine, small):
    plain, llm = engine(**SETTINGS), engine(small, TREE, **SCARCE, **SETTINGS)
    assert check_as_plain(plain, llm) > 1.5
    check_further(plain, llm)


@pytest.mark.wide
def test_torch_compile(engine, small):
    check_compiled(engine, small, TREE)


def test_a_tree_accepts_more_than_vllms_chain(engine, checkpoints, small):
    """The same drafter, and the same number of verified tokens."""
    chain = {"method": "draft_model", "model": str(checkpoints[small]), "num_speculative_tokens": 4}
    stock = engine(speculative_config=chain, **SETTINGS)
    check_against_chain(stock, engine(small, {**TREE, "num_speculative_tokens": 4}, **SETTINGS), 1.2)


def test_a_union_with_a_measured_budget(engine, checkpoints, tmp_path, monkeypatch):
    """The drafter's vocabulary is padded and it knows few positions; the budget times its forwards, and it pauses."""
    checkpoints["named"] = tiny.write_target(tmp_path / "named")
    padded = tiny.write_sibling(
        tmp_path / "padded", checkpoints["named"], vocab_size=tiny.VOCAB + 32, max_position_embeddings=96
    )
    for folder in (checkpoints["named"], padded):
        tiny.write_tokenizer(folder)
    plain = engine(target="named", **SETTINGS)
    expected = answers_of(plain, PROMPTS, PARAMS)
    sources = [{"method": "draft_tree", "model": str(padded)}, {"method": "lookup"}]
    union = {"method": "union", "sources": sources, "budget": "measured", "num_speculative_tokens": 12}
    llm = engine(target="named", speculative_config=union, **SETTINGS)
    assert answers_of(llm, PROMPTS, PARAMS) == expected
    answers, share = drafts_after_pauses(monkeypatch, llm, PROMPTS, LONG)
    assert answers == answers_of(plain, PROMPTS, LONG) and share == 1


def test_a_drafter_with_other_token_ids(engine, checkpoints, tmp_path, caplog):
    """The tokens are matched by their text; two are missing."""
    checkpoints["named"] = tiny.write_target(tmp_path / "named")
    checkpoints["renumbered"] = tiny.write_sibling(tmp_path / "renumbered", checkpoints["named"])
    for folder in (checkpoints["named"], checkpoints["renumbered"]):
        tiny.write_tokenizer(folder)
    tiny.renumber(checkpoints["renumbered"], lost=("e", "true"))
    llm = engine("renumbered", TREE, target="named", **SCARCE, **SETTINGS)
    assert "drafts the 158 tokens that have the same text in both" in caplog.text
    assert check_as_plain(engine(**SETTINGS), llm) > 1.5


def test_a_drafter_with_windows_in_some_layers(engine, checkpoints, tmp_path):
    checkpoints["windows"] = tiny.write_target_with_windows(tmp_path / "windows", 16)
    with pytest.raises(ConfigError, match="--disable-hybrid-kv-cache-manager"):
        engine("windows", TREE, **SETTINGS)
    llm = engine("windows", TREE, disable_hybrid_kv_cache_manager=True, **SETTINGS)
    expected = answers_of(engine(**SETTINGS), PROMPTS, PARAMS)
    assert answers_of(llm, PROMPTS, PARAMS) == expected
