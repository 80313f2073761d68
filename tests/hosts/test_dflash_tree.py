"""Trees from a DFlash head: the tokens are those of plain vLLM, and drafts are accepted."""

from __future__ import annotations

import pytest
from vllm import SamplingParams

from tests.doubles import dflash
from tests.hosts.conftest import acceptance_length, counters, drafts_after_pauses, token_ids
from tests.hosts.test_architectures import PARAMS, PROMPTS
from tests.hosts.test_draft_tree import LONG, SETTINGS, check_as_plain
from tests.hosts.test_mtp import seen_at_once  # noqa: F401

TREE = {"method": "dflash_tree", "num_speculative_tokens": 12, "budget": "fixed", "min_node_value": 0.0}
#: Like one of the others.
RARE = ("windows of blocks", "DSpark, speculators", "DFlash 2, speculators")
FORMS = [pytest.param(form, marks=[pytest.mark.wide] * (form in RARE)) for form in dflash.FORMS]


@pytest.fixture(scope="module")
def head(checkpoints, tmp_path_factory) -> str:
    """It knows the greedy answers to every other prompt by heart."""
    known = [prompt["prompt_token_ids"] for prompt in PROMPTS[::2]]
    folder = tmp_path_factory.mktemp("dflash") / "head"
    checkpoints["dflash"] = dflash.write_head(folder, checkpoints["target"], known, answer_len=40)
    return "dflash"


def test_same_as_plain(engine, head):
    assert check_as_plain(engine, head, TREE) > 1.2


@pytest.mark.parametrize("form", FORMS)
def test_other_forms(engine, checkpoints, tmp_path, form):
    """As they are published: tokens greedy and seeded, with too few KV blocks and prompts in chunks."""
    known = [prompt["prompt_token_ids"] for prompt in PROMPTS[::2]]
    path = tmp_path / "head"
    checkpoints[form] = dflash.write_head(path, checkpoints["target"], known, 40, form=dflash.FORMS[form])
    expected = token_ids(engine(**SETTINGS).generate(PROMPTS, PARAMS, use_tqdm=False))
    llm = engine(form, TREE, num_gpu_blocks_override=18, max_num_batched_tokens=64, **SETTINGS)
    assert token_ids(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
    assert counters(llm)["preemptions"] > 0
    assert acceptance_length(llm) > 1.4


def test_a_tree_accepts_more_than_vllms_chain(engine, checkpoints, head):
    """The same head, and the same number of verified tokens; it knows these answers by heart."""
    params, known = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), PROMPTS[::2]
    chain = {"method": "dflash", "model": str(checkpoints[head]), "num_speculative_tokens": 4}
    stock = engine(speculative_config=chain, **SETTINGS)
    expected = token_ids(stock.generate(known, params, use_tqdm=False))
    llm = engine(head, {**TREE, "num_speculative_tokens": 4}, **SETTINGS)
    assert token_ids(llm.generate(known, params, use_tqdm=False)) == expected
    assert acceptance_length(llm) >= acceptance_length(stock) > 2


def test_a_union_with_a_measured_budget(engine, checkpoints, head, monkeypatch):
    plain = engine(**SETTINGS)
    expected = token_ids(plain.generate(PROMPTS, PARAMS, use_tqdm=False))
    sources = [{"method": "dflash_tree", "model": str(checkpoints[head])}, {"method": "lookup"}]
    union = {"method": "union", "sources": sources, "budget": "measured", "num_speculative_tokens": 12}
    llm = engine(speculative_config=union, **SETTINGS)
    assert token_ids(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
    answers, _ = drafts_after_pauses(monkeypatch, llm, PROMPTS, LONG)
    assert answers == token_ids(plain.generate(PROMPTS, LONG, use_tqdm=False))
