"""Token identity with plain decoding on the V2 model runner, in float32."""

from __future__ import annotations

import pytest
import torch

from tests.doubles.cuda_graphs import Capture
from tests.host_versions import SKIPS_DRAFTS
from tests.hosts.conftest import acceptance_length, counters, runner_of, some, token_ids
from tests.v2.conftest import (
    ENGINE,
    GREEDY,
    SAMPLED,
    SCARCE,
    WITH_HISTORY,
    answers,
    check_control,
    check_preemption,
    check_prefix_cache_hits,
    same,
    watch_rounds,
)
from vllm_specplug.core.step import StepPlan
from vllm_specplug.gpu import sampler as v2_sampler
from vllm_specplug.gpu import step as v2_step
from vllm_specplug.gpu.drafters import eagle
from vllm_specplug.gpu.runner import TreeRunner
from vllm_specplug.gpu.trees import DeviceTrees

PROVEN = True
TREE = {"num_speculative_tokens": 9, "draft_depth": 3, "draft_top_k": 3}
CHAIN = {"num_speculative_tokens": 3, "draft_depth": 3, "draft_top_k": 1}


@pytest.fixture(scope="module")
def llm(engine):
    return engine("eagle", TREE, **ENGINE)


@pytest.mark.interpreted
def test_greedy_trees(prompts, plain, llm):
    assert isinstance(runner_of(llm), TreeRunner)
    assert same(answers(llm, prompts), plain)
    assert acceptance_length(llm) > 1.2  # else trees would not have been exercised


def test_greedy_chains(engine, prompts, plain):
    llm = engine("eagle", CHAIN, **ENGINE)
    assert same(answers(llm, prompts), plain)


@pytest.mark.parametrize("params", [SAMPLED, WITH_HISTORY], ids=["parallel", "by depth"])
def test_same_seed_same_tokens(llm, prompts, plainly, params):
    prompts = prompts[: len(params)]
    assert same(answers(llm, prompts, params), plainly(prompts, params))


@pytest.mark.parametrize("params", [SAMPLED, WITH_HISTORY], ids=["parallel", "by depth"])
def test_sampling_by_chunks(llm, prompts, plainly, params, monkeypatch):
    """As the host bounds its copies of logits; of one request, no chunk is made smaller."""
    sampler, rows = runner_of(llm).sampler, []
    honest = sampler.sample

    def counted(logits, *args, **kwargs):
        rows.append(len(logits))
        return honest(logits, *args, **kwargs)

    monkeypatch.setattr(sampler, "sample", counted)
    monkeypatch.setattr(v2_sampler, "get_max_chunk_logits", lambda _: 4)
    prompts = prompts[: len(params)]
    assert same(answers(llm, prompts, params), plainly(prompts, params))
    assert max(rows) == (10 if params is SAMPLED else 4)


def test_prefix_cache_hits_on_blocks_written_by_trees(llm, prompts, plainly):
    check_prefix_cache_hits(plainly, llm, prompts)


@pytest.mark.interpreted
def test_forced_preemption_and_chunked_prefill(engine, prompts, plain):
    check_preemption(engine("eagle", TREE, **SCARCE), prompts, plain)


@pytest.mark.skipif(not SKIPS_DRAFTS, reason="this vLLM wants drafts in each step")
def test_no_drafts_after_chunks_of_prompts(engine, prompts, plain, monkeypatch):
    """The drafter writes its key/value of these steps, and drafts well afterwards."""
    llm = engine("eagle", TREE, **SCARCE)
    speculator, calls = runner_of(llm).speculator, []
    honest = speculator.keep_up
    monkeypatch.setattr(speculator, "keep_up", lambda *args, **kwargs: calls.append(1) or honest(*args, **kwargs))
    assert same(answers(llm, prompts), plain)
    assert calls and acceptance_length(llm) > 1.2


def skip_moves(patch, _):
    patch.setattr(v2_step, "move_rows", lambda *_: None)


def broken_step_plan(patch, _):
    """The first rows of each tree are taken for the accepted ones."""
    honest = v2_step.plan_step

    def flat(walk, row_start, num_flat_rows):
        rows = honest(walk, row_start, num_flat_rows).target_rows
        return StepPlan(rows, rows, torch.arange(num_flat_rows, device=rows.device), rows.amax(dim=1))

    patch.setattr(v2_step, "plan_step", flat)


def wrong_bit(patch, _):
    """Rows see the first node whether or not it is an ancestor."""
    honest = DeviceTrees.stage

    def stage(self, input_batch):
        rows = honest(self, input_batch)
        self.bits[:, 2:, 0] ^= 2
        return rows

    patch.setattr(DeviceTrees, "stage", stage)


def stale_positions(patch, _):
    """Rows at their flat positions."""
    honest = DeviceTrees.stage

    def stage(self, input_batch):
        flat = input_batch.positions.clone()
        rows = honest(self, input_batch)
        input_batch.positions.copy_(flat)
        return rows

    patch.setattr(DeviceTrees, "stage", stage)


@pytest.mark.parametrize("spoil", [skip_moves, broken_step_plan, wrong_bit, stale_positions])
def test_controls(llm, prompts, plain, monkeypatch, spoil):
    """The negative controls: each must make the identity tests fail."""
    spoil(monkeypatch, runner_of(llm))
    check_control(llm, prompts, plain)


@pytest.mark.parametrize("async_scheduling", some([True, False], [False]))
def test_cuda_graphs(graph_engine, llm, prompts, plain, monkeypatch, async_scheduling):
    """Verification and the drafter's forwards with their attention from recorded graphs; they draft as without."""
    honest, have_cache = eagle.DeviceLevels, []

    def look(model, rows, slots, positions, block_table, *args):
        if Capture.active is not None:
            have_cache.append(block_table is not None)
        return honest(model, rows, slots, positions, block_table, *args)

    monkeypatch.setattr(eagle, "DeviceLevels", look)
    with_graphs = graph_engine("eagle", TREE, async_scheduling=async_scheduling, max_num_seqs=3, **ENGINE)
    accepted = []
    for one in (llm, with_graphs):
        one.reset_prefix_cache()
        before = counters(one)
        assert same(answers(one, prompts), plain)
        accepted.append(acceptance_length(one, before))
    assert accepted[0] == accepted[1] and all(have_cache)
    assert have_cache or torch.cuda.is_available()  # a GPU's own captures are not seen here


def test_a_round_never_waits_for_the_device(llm, prompts, plain, monkeypatch):
    """From the sampled rows to the next drafts, no value is read back."""
    rounds = watch_rounds(llm, monkeypatch)
    assert token_ids(llm.generate(prompts[:2], GREEDY, use_tqdm=False)) == plain[0][:2]
    assert len(rounds) > 4
