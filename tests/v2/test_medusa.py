"""Medusa heads on the V2 model runner: the tokens of plain decoding, and drafts from the right hidden state."""

from __future__ import annotations

import pytest

from tests.hosts.conftest import acceptance_length, counters, token_ids
from tests.v2.conftest import (
    ENGINE,
    GREEDY,
    SAMPLED,
    SCARCE,
    answers,
    check_greedy,
    check_preemption,
    check_prefix_cache_hits,
    same,
)
from vllm_specplug.gpu.drafters.heads import HeadsSpeculator
from vllm_specplug.gpu.trees import DeviceTrees

PROVEN = True
#: Siblings before the best path: accepted rows are no flat prefix.
TREE = {"method": "medusa", "num_speculative_tokens": 8, "budget": "fixed"}
TREE["tree"] = [[1], [0], [2], [1, 0], [0, 1], [0, 0], [0, 0, 1], [0, 0, 0]]
CHAIN = {**TREE, "tree": [[0], [0, 0], [0, 0, 0]]}
DYNAMIC = {"method": "medusa", "num_speculative_tokens": 8, "budget": "fixed", "dynamic": True, "draft_top_k": 3}


@pytest.fixture(scope="module")
def llm(engine, heads):
    return engine(heads, TREE, **ENGINE)


def test_greedy_trees(llm, prompts, plain, monkeypatch):
    check_greedy(llm, HeadsSpeculator, prompts, plain, 1.8, monkeypatch)


@pytest.mark.parametrize("shape", [CHAIN, DYNAMIC], ids=["chain", "dynamic"])
def test_other_shapes(engine, heads, prompts, plain, shape):
    llm = engine(heads, shape, **ENGINE)
    assert same(answers(llm, prompts), plain)
    assert acceptance_length(llm) > 1.8


def test_same_seed_same_tokens(llm, prompts, plainly):
    assert same(answers(llm, prompts, SAMPLED), plainly(prompts, SAMPLED))


def test_prefix_cache_hits_on_blocks_written_by_trees(llm, prompts, plainly):
    check_prefix_cache_hits(plainly, llm, prompts)


def test_forced_preemption_and_chunked_prefill(engine, heads, prompts, plain):
    check_preemption(engine(heads, TREE, **SCARCE), prompts, plain)


@pytest.mark.wide
@pytest.mark.parametrize("shape", [TREE, DYNAMIC], ids=["static", "dynamic"])
def test_cuda_graphs(graph_engine, heads, prompts, plain, shape):
    """Verification and the heads from recorded graphs."""
    llm = graph_engine(heads, shape, async_scheduling=True, max_num_seqs=3, **ENGINE)
    assert same(answers(llm, prompts), plain)


def tau(llm, prompts, plain):
    """Of one more run; the answers must be plain decoding's."""
    before = counters(llm)
    assert token_ids(llm.generate(prompts, GREEDY, use_tqdm=False)) == plain[0][: len(prompts)]
    return acceptance_length(llm, before)


def test_control_with_the_wrong_hidden_row(llm, prompts, plain, monkeypatch):
    """Heads that see a row of the flat prefix, not of the path, accept less; nothing else changes."""
    honest = tau(llm, prompts[:1], plain)
    monkeypatch.setattr(DeviceTrees, "last_rows", lambda self, batch: self.plan.target_rows.amax(dim=1))
    assert tau(llm, prompts[:1], plain) < 0.9 * honest
