"""Lookup and union trees in the real engine: the tokens are plain decoding's, whatever the sources do."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint

import pytest
from vllm import SamplingParams

from tests.hosts.conftest import (
    acceptance_length,
    answers_of,
    check_prefix_cache_hits,
    counters,
    make_prompts,
    unlucky_drafter,
)
from vllm_specplug import proposer

GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


def lookup(**changes):
    return {"method": "lookup", "budget": "fixed", **changes}


def union(checkpoints, *more, **changes):
    eagle = {
        "method": "eagle2", "model": str(checkpoints["eagle"]), "num_speculative_tokens": 12, "draft_depth": 4,
        "draft_top_k": 4, "min_node_value": 0.0, "min_level_value": 0.0,
    }  # fmt: skip
    sources = [eagle, {"method": "lookup"}, *more]
    return {"method": "union", "sources": sources, "num_speculative_tokens": 20, "budget": "fixed", **changes}


@pytest.fixture(scope="session")
def start(engine):
    """``start(speculative_config, **engine_options)``: an engine, kept for the session."""
    return lambda speculative, **options: engine(speculative_config=speculative, **options)


@pytest.fixture(scope="module")
def prompts():
    """Half of them repeat themselves."""
    plain = make_prompts(24, seed=9)
    for prompt in plain[::2]:
        prompt["prompt_token_ids"] = prompt["prompt_token_ids"][:20] * 3
    return plain


@pytest.fixture(scope="module")
def expected(engine, prompts):
    return answers_of(engine(), prompts, GREEDY)


@pytest.fixture(params=["lookup", "union"])
def speculative(request, checkpoints):
    return lookup() if request.param == "lookup" else union(checkpoints)


def test_batch_of_8(start, prompts, expected, speculative):
    llm = start(speculative)
    assert answers_of(llm, prompts, GREEDY) == expected
    assert acceptance_length(llm) > 1.2  # else trees would not have been exercised
    # Once more: now traffic knows the answers.
    assert answers_of(llm, prompts, GREEDY) == expected


def test_batch_of_1(start, prompts, expected, speculative):
    llm = start(speculative)
    for prompt, answer in zip(prompts[:2], expected, strict=False):
        assert answers_of(llm, [prompt], GREEDY) == [answer]


def test_seeded_sampling(engine, start, prompts, speculative):
    params = [
        SamplingParams(temperature=0.8, top_p=0.9, seed=i, max_tokens=40, ignore_eos=True) for i in range(len(prompts))
    ]
    wanted = answers_of(engine(), prompts, params)
    assert answers_of(start(speculative), prompts, params) == wanted


def test_preemption(engine, start, prompts, checkpoints):
    long = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    wanted = answers_of(engine(block_size=32), prompts[:16], long)
    llm = start(union(checkpoints), block_size=32, num_gpu_blocks_override=14, enable_prefix_caching=False)
    assert answers_of(llm, prompts[:16], long) == wanted
    assert counters(llm)["preemptions"] > 0


def test_chunked_prefill_and_prefix_cache_hits(engine, start, prompts, checkpoints):
    """Long prompts in chunks of 48."""
    llm = start(union(checkpoints), block_size=32, max_num_batched_tokens=48, max_num_seqs=2)
    check_prefix_cache_hits(engine(block_size=32), llm, prompts[:6])


def test_running_into_max_model_len(engine, start, prompts, checkpoints):
    endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    wanted = answers_of(engine(), prompts[:8], endless)
    assert answers_of(start(union(checkpoints)), prompts[:8], endless) == wanted


# ---- sources that fail


@pytest.fixture
def hostile(monkeypatch):
    """Register ``tests.doubles.hostile``'s methods, as another distribution would."""
    ours = proposer._registered()
    names = ("wrong", "twice", "nothing", "raising", "garbage", "misshapen")
    entries = {
        name: EntryPoint(name=name, value=f"tests.doubles.hostile:{name.upper()}", group=proposer.GROUP)
        for name in names
    }
    monkeypatch.setattr(proposer, "_registered", lambda: {**ours, **entries})
    proposer.find_method.cache_clear()
    yield names
    proposer.find_method.cache_clear()


@pytest.mark.parametrize("names", [("wrong", "twice"), ("raising", "garbage"), ("nothing", "misshapen"), "raising"])
def test_hostile_sources(hostile, start, checkpoints, prompts, expected, names, caplog):
    """Always wrong, duplicated, empty, raising, ids out of range, wrong shapes: two beside ours, and alone."""
    alone = isinstance(names, str)
    llm = start(
        {"method": names, "budget": "fixed"} if alone else union(checkpoints, *({"method": name} for name in names))
    )
    assert answers_of(llm, prompts[:8], GREEDY) == expected[:8]
    if not alone:
        assert acceptance_length(llm) > 1.2
    for name in [names] if alone else names:
        said = [record for record in caplog.records if f"'{name}" in record.getMessage()]
        assert len(said) == (name in ("raising", "garbage", "misshapen"))


def test_a_failing_drafter_of_the_host(start, checkpoints, prompts, expected, monkeypatch, caplog):
    """Every third draft of the EAGLE source fails: the union goes on with the others."""
    llm = start(union(checkpoints))
    calls = unlucky_drafter(monkeypatch)
    assert answers_of(llm, prompts, GREEDY) == expected
    assert len(calls) > 9 and sum("out of luck" in record.getMessage() for record in caplog.records) == 1


# ---- accounting


def test_trace_tells_which_source_earned_what(start, checkpoints, prompts, tmp_path):
    path = tmp_path / "trees.jsonl"
    llm = start(union(checkpoints, trace_trees=str(path)))
    llm.generate(prompts, GREEDY, use_tqdm=False)
    trees = [json.loads(line) for line in path.read_text().splitlines()]
    for tree in trees:
        assert len(tree["sources"]) == len(tree["log_values"]) == len(tree["parents"]) - 1
        for names in tree["sources"]:
            assert names and set(names) <= {"eagle2", "lookup"}
        for value, parent in zip(tree["log_values"], tree["parents"][1:], strict=True):
            assert value <= (tree["log_values"][parent - 1] if parent else 0.0)
    accepted = [tree["sources"][row - 1] for tree in trees for row in tree["accepted_rows"][1:]]
    assert len(accepted) > 0.2 * len(trees)
    for name in ("eagle2", "lookup"):
        drafted = sum(name in names for tree in trees for names in tree["sources"])
        assert drafted > sum(name in names for names in accepted) > sum(names == [name] for names in accepted) > 0
