"""Trees from a DFlash head: the tokens are those of plain vLLM, and drafts are accepted."""

from __future__ import annotations

import pytest

from tests.doubles import dflash
from tests.hosts.conftest import answers_of, drafts_after_pauses, some
from tests.hosts.same_as_plain import LONG, PARAMS, PROMPTS, SCARCE, SETTINGS, check_against_chain, check_as_plain
from tests.hosts.test_draft_tree import check_compiled, check_further

PROVEN = True
TREE = {"method": "dflash_tree", "num_speculative_tokens": 12, "budget": "fixed", "min_node_value": 0.0}


@pytest.fixture(scope="module")
def head(checkpoints, tmp_path_factory) -> str:
    """It knows the greedy answers to every other prompt by heart."""
    known = [prompt["prompt_token_ids"] for prompt in PROMPTS[::2]]
    folder = tmp_path_factory.mktemp("dflash") / "head"
    checkpoints["dflash"] = dflash.write_head(folder, checkpoints["target"], known, answer_len=40)
    return "dflash"


def test_same_as_plain(engine, head):
    plain, llm = engine(**SETTINGS), engine(head, TREE, **SCARCE, **SETTINGS)
    assert check_as_plain(plain, llm) > 1.2
    check_further(plain, llm)


@pytest.mark.wide
def test_torch_compile(engine, head):
    check_compiled(engine, head, TREE)


@pytest.mark.parametrize("form", some(dflash.FORMS, ["DSpark"]))
def test_other_forms(engine, checkpoints, tmp_path, form):
    """As they are published."""
    known = [prompt["prompt_token_ids"] for prompt in PROMPTS[::2]]
    path = tmp_path / "head"
    checkpoints[form] = dflash.write_head(path, checkpoints["target"], known, 40, form=dflash.FORMS[form])
    llm = engine(form, TREE, **{**SCARCE, "num_gpu_blocks_override": 18}, **SETTINGS)
    assert check_as_plain(engine(**SETTINGS), llm) > 1.4


def test_a_tree_accepts_more_than_vllms_chain(engine, checkpoints, head):
    """The same head, and the same number of verified tokens; it knows these answers by heart."""
    chain = {"method": "dflash", "model": str(checkpoints[head]), "num_speculative_tokens": 4}
    stock = engine(speculative_config=chain, **SETTINGS)
    llm = engine(head, {**TREE, "num_speculative_tokens": 4}, **SETTINGS)
    check_against_chain(stock, llm, 2, PROMPTS[::2])


def test_a_union_with_a_measured_budget(engine, checkpoints, head, monkeypatch):
    plain = engine(**SETTINGS)
    expected = answers_of(plain, PROMPTS, PARAMS)
    sources = [{"method": "dflash_tree", "model": str(checkpoints[head])}, {"method": "lookup"}]
    union = {"method": "union", "sources": sources, "budget": "measured", "num_speculative_tokens": 12}
    llm = engine(speculative_config=union, **SETTINGS)
    assert answers_of(llm, PROMPTS, PARAMS) == expected
    answers, _ = drafts_after_pauses(monkeypatch, llm, PROMPTS, LONG)
    assert answers == answers_of(plain, PROMPTS, LONG)
