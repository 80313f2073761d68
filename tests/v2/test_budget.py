"""The measured budget on the V2 runner: tokens stay those of plain decoding while the shape changes at every step."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch

from tests.hosts.conftest import runner_of
from tests.v2.conftest import (
    ENGINE,
    GREEDY,
    SAMPLED,
    WITH_HISTORY,
    NoLookAtTheDevice,
    answers,
    same,
    watch_rounds,
)
from vllm_specplug.budget import saved
from vllm_specplug.budget.choose import ShapeBudget
from vllm_specplug.budget.cost import RoundCost
from vllm_specplug.gpu import budget as serving_budget
from vllm_specplug.gpu import step_times
from vllm_specplug.gpu.rounds import facts
from vllm_specplug.gpu.scheduler import AsyncTreeScheduler

MEASURED = {"num_speculative_tokens": 15, "draft_depth": 4, "draft_top_k": 3, "budget": "measured"}
EAGLE = {"method": "eagle2", **MEASURED, "min_node_value": 0.0, "min_level_value": 0.0}
#: Without the answers of other tests, which would be accepted.
LOOKUP = {"method": "lookup", "traffic_tokens": 0, "num_speculative_tokens": 15, "draft_depth": 6, "budget": "measured"}
MEASURE = step_times.StepMeasurement.measure
#: Each shape after each other one.
CHANGES = (15, 7, 0, 15, 0, 0, 7, 7, 15, 15)


def seconds(drafts: float) -> dict[int, dict[int, float]]:
    """Made-up step times: rounds of 7 and 15 nodes take ``drafts`` and twice ``drafts`` times a plain step; smaller
    ones never pay."""
    return {
        nodes: {1: factor, 8: factor}
        for nodes, factor in zip((0, 1, 3, 7, 15), (1.0, 9.0, 9.0, drafts, 2 * drafts), strict=True)
    }


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of step times for this module, made up when they would be measured."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache") / "costs"
        patch.setattr(saved, "ROUNDS", folder)
        patch.setattr(step_times.StepMeasurement, "measure", lambda _: seconds(1.2))
        yield patch


@pytest.fixture(scope="module")
def start(engine, cache, checkpoints):
    def make(method="eagle2", **options):
        speculative = LOOKUP
        if method == "eagle2":
            speculative = {**EAGLE, "model": str(checkpoints["eagle"])}
        if method == "union":
            sources = [
                {"method": "eagle2", "model": str(checkpoints["eagle"]), "num_speculative_tokens": 9, "draft_depth": 3},
                {"method": "lookup", "num_speculative_tokens": 8, "draft_depth": 6},
            ]
            speculative = {"method": "union", "num_speculative_tokens": 15, "budget": "measured", "sources": sources}
        return engine(speculative_config=speculative, **ENGINE, **options)

    return make


def scheduler_of(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler


def force(llm, monkeypatch, shapes=CHANGES):
    """Let the rounds have these shapes in turn; the list gets those that were verified."""
    turns, seen = cycle(shapes), []
    monkeypatch.setattr(scheduler_of(llm).round_budget, "plan", lambda _: next(turns))
    runner = runner_of(llm)
    honest = runner.sample

    def look(hidden, input_batch, *args):
        if input_batch.num_draft_tokens_per_req is None:
            seen.append({0})
        else:
            seen.append(set(input_batch.num_draft_tokens_per_req.tolist()))
        return honest(hidden, input_batch, *args)

    monkeypatch.setattr(runner, "sample", look)
    return seen


def check_shapes(seen):
    assert {15, 7, 0} <= set().union(*seen), seen
    assert any(one == {0} for one in seen)  # no request drafted: the step was a plain one


@pytest.mark.parametrize("method", ["eagle2", "lookup", "union"])
def test_greedy_while_shapes_change(start, prompts, plain, monkeypatch, method):
    llm = start(method)
    seen = force(llm, monkeypatch)
    assert same(answers(llm, prompts), plain)
    check_shapes(seen)


@pytest.mark.parametrize("params", [SAMPLED, WITH_HISTORY], ids=["parallel", "by depth"])
def test_same_seed_same_tokens_while_shapes_change(start, prompts, plainly, monkeypatch, params):
    llm, prompts = start(), prompts[: len(params)]
    force(llm, monkeypatch, (7, 0, 15))
    assert same(answers(llm, prompts, params), plainly(prompts, params))


def test_requests_join_and_leave(start, prompts, plainly, monkeypatch):
    params = [GREEDY.clone() for _ in prompts]
    for count, one in zip((4, 12, 8), params, strict=True):
        one.max_tokens = count
    llm = start(max_num_batched_tokens=48, max_num_seqs=3, max_model_len=96)  # prompts come in by pieces
    seen = force(llm, monkeypatch)
    assert same(answers(llm, prompts * 2, params * 2), plainly(prompts * 2, params * 2))
    assert any(len(one) > 1 for one in seen)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is the default")
def test_asynchronous_scheduling(start, prompts, plain, asynchronous, monkeypatch):
    llm = start("lookup", seed=0)
    seen = force(llm, monkeypatch)
    assert isinstance(scheduler_of(llm), AsyncTreeScheduler)
    assert same(answers(llm, prompts), plain)
    check_shapes(seen)


# ---- the drafter's key/value of plain steps

#: Plain steps, then one that drafts.
PAUSED = (0, 0, 0, 0, 15)


def drafts_behind_a_pause(llm, prompts, monkeypatch):
    """The nodes drafted when drafting resumes, with nothing known from earlier runs."""
    llm.reset_prefix_cache()
    speculator, drafted = runner_of(llm).speculator, []
    (name,) = speculator.draft_attn_layer_names
    speculator.vllm_config.compilation_config.static_forward_context[name].kv_cache.zero_()
    largest = (max(speculator.depths), False)
    honest = speculator._growths[largest]

    def look(num_reqs, *inputs):
        found = honest(num_reqs, *inputs)
        drafted.append(found[0].clone())
        return found

    with monkeypatch.context() as patch:
        force(llm, patch, PAUSED)
        patch.setitem(speculator._growths, largest, look)
        answers(llm, prompts[:1])
    return torch.cat(drafted)


def test_the_drafter_keeps_up_with_plain_steps(start, prompts, monkeypatch):
    """Key/value alone gives the drafts that the drafter's whole forward gives; without it, others."""
    llm = start()
    speculator = runner_of(llm).speculator
    assert speculator._writer is not None
    found = drafts_behind_a_pause(llm, prompts, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(speculator, "_writer", None)
        assert torch.equal(found, drafts_behind_a_pause(llm, prompts, monkeypatch))
    with monkeypatch.context() as patch:  # the negative control
        patch.setattr(speculator, "keep_up", lambda batch, *_, **__: speculator.draft_nothing(batch))
        assert not torch.equal(found, drafts_behind_a_pause(llm, prompts, monkeypatch))


def test_no_round_waits_for_the_device(start, prompts, monkeypatch):
    """Neither a smaller round nor a plain one reads a value back."""
    llm = start()
    speculator, smaller = runner_of(llm).speculator, []
    rounds = watch_rounds(llm, monkeypatch)
    honest, write = speculator._growths[7, False], speculator._writer.key_value

    def watched(function):
        def call(*args):
            smaller.append(function)
            with NoLookAtTheDevice():
                return function(*args)

        return call

    monkeypatch.setitem(speculator._growths, (7, False), watched(honest))
    monkeypatch.setattr(speculator._writer, "key_value", watched(write))
    force(llm, monkeypatch, (7, 0, 15))
    answers(llm, prompts[:1])
    assert len(rounds) > 1 and {honest, write} == set(smaller)


# ---- decisions


def chosen_shapes(llm, prompts, monkeypatch, learns=True):
    """The shapes that a new budget chooses for drafts that no one accepts, by step; times stay as made up."""
    serving = scheduler_of(llm).round_budget
    budget = ShapeBudget(RoundCost(seconds(1.2), 8), serving.budget.shapes, 4096)
    chosen, plan = [], budget.plan
    monkeypatch.setattr(serving, "budget", budget)
    monkeypatch.setattr(budget, "plan", lambda num_reqs: (chosen.append(plan(num_reqs)), chosen[-1])[1])
    monkeypatch.setattr(budget.cost, "observe", lambda *_: None)
    # The model repeats itself at times, so that some drafts would be accepted.
    learn = budget.learn if learns else lambda *_: None
    monkeypatch.setattr(budget, "learn", lambda nodes, _, num_reqs: learn(nodes, 0, num_reqs))
    params = GREEDY.clone()
    params.max_tokens = 30
    answers(llm, prompts, params)
    return chosen


def test_the_budget_stops_drafts_that_nobody_accepts(start, prompts, monkeypatch):
    chosen = chosen_shapes(start("lookup"), prompts, monkeypatch)
    assert any(chosen[:3]) and chosen[-8:].count(0) >= 7, chosen


def test_control_without_outcomes_it_does_not_adapt(start, prompts, monkeypatch):
    chosen = chosen_shapes(start("lookup"), prompts[:1], monkeypatch, learns=False)
    assert 0 not in chosen[-8:], chosen


def test_step_times_are_measured_and_kept(engine, monkeypatch, tmp_path, prompts, plain):
    """By whole steps at start; a second start, and the scheduler, read them."""
    monkeypatch.setattr(saved, "ROUNDS", tmp_path / "costs")
    monkeypatch.setattr(step_times.StepMeasurement, "measure", MEASURE)
    monkeypatch.setattr(step_times, "TIMES", 1)
    small = {"method": "lookup", "num_speculative_tokens": 7, "draft_depth": 4, "budget": "measured"}
    llm = engine(speculative_config=small, max_num_seqs=2, **ENGINE)
    known = saved.load(RoundCost, facts(llm.llm_engine.vllm_config, serving_budget.device_name()), 2)
    # A shape that cannot pay for one request is not timed for two.
    assert set(known.measured) == {0, 1, 3, 7} and len(known.measured[0]) == 2
    assert all(min(points.values()) > 0 for points in known.measured.values())
    assert scheduler_of(llm).round_budget.budget.cost.measured == known.measured
    monkeypatch.setattr(step_times.StepMeasurement, "measure", lambda _: pytest.fail("measured again"))
    step_times.measure_if_unknown(llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker)
    assert answers(llm, prompts[:2])[0] == plain[0][:2]
