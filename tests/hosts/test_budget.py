"""The measured budget in the engine: drafting goes on and off in the middle of requests, tokens stay the same."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from vllm import LLM, SamplingParams

from tests.hosts.conftest import ENGINE, GREEDY, all_nodes, answers_of, counters, make_prompts, record_drafts, runner_of
from vllm_specplug.budget import saved
from vllm_specplug.budget.choose import Plan
from vllm_specplug.budget.cost import StepCost
from vllm_specplug.budget.planner import PLAIN
from vllm_specplug.cpu import budget as cpu_budget
from vllm_specplug.cpu.drafters.catch_up import MissedRows
from vllm_specplug.cpu.kernels import tree_ops
from vllm_specplug.cpu.runner import TreeCPUModelRunner
from vllm_specplug.utils.metrics import _INDEX


def eagle(checkpoints, drafter="eagle", **changes):
    tree = {"num_speculative_tokens": 12, "draft_depth": 4, "draft_top_k": 4}
    return {"method": "eagle2", "model": str(checkpoints[drafter]), **tree, **changes}


def union(checkpoints):
    return {"method": "union", "sources": [eagle(checkpoints), {"method": "lookup"}]}


@pytest.fixture(scope="module")
def start(engine, checkpoints):
    engine()

    def make(speculative, **options):
        name = json.dumps([speculative, options], sort_keys=True)
        if name not in started:
            llm = LLM(
                str(checkpoints["target"]),
                speculative_config={"budget": "measured", **speculative},
                **{**ENGINE, "enable_prefix_caching": False, **options},
            )
            engine.kept.append(llm)
            started[name] = llm
        return started[name]

    started = {}
    return make


@pytest.fixture(scope="module")
def prompts():
    return make_prompts(24, seed=3)


def budget_of(llm):
    return runner_of(llm).serving_budget.budget


@pytest.fixture
def verified(monkeypatch):
    """(nodes, accepted ones) of every tree that is verified from now on."""
    trees, walker = [], TreeCPUModelRunner._walker

    def counting(self, step, num_reqs):
        walk_trees = walker(self, step, num_reqs)

        def walk(tree, *args):
            result = walk_trees(tree, *args)
            pairs = zip((tree.num_rows - 1).tolist(), (result[0].num_emitted - 1).tolist(), strict=True)
            trees.extend(pair for pair in pairs if pair[0])
            return result

        return walk

    monkeypatch.setattr(TreeCPUModelRunner, "_walker", counting)
    return trees


def accepted(trees):
    return sum(count for _, count in trees)


@pytest.fixture
def toggled(monkeypatch):
    """Draw arms at random for some steps each, and verify every node drafted.

    The result lists the arms that ran, and for each draft phase of a union whether the model drafter ran.
    """

    def toggle(budget, seed=0):
        rng, ran, state = random.Random(seed), [], {"left": 0, "arm": PLAIN}

        def plan(_num_reqs, _missed_rows=0):
            if state["left"] == 0:
                state["left"], state["arm"] = rng.randrange(1, 7), rng.choice(budget.arms)
            state["left"] -= 1
            budget.running = state["arm"]
            ran.append(state["arm"])
            return Plan(state["arm"])

        def wants_model(_):
            ran.append(rng.random() < 0.5)
            return ran[-1]

        monkeypatch.setattr(budget, "plan", plan)
        monkeypatch.setattr(budget, "wants_model", wants_model)
        monkeypatch.setattr(budget, "select", all_nodes)
        return ran

    return toggle


@pytest.mark.parametrize("drafter", ["eagle", "eagle3", "reduced"])  # the last one grows trees in one operator
def test_identity_while_drafting_goes_on_and_off(start, checkpoints, prompts, plain, toggled, verified, drafter):
    llm = start(eagle(checkpoints, drafter))
    ran = toggled(budget_of(llm))
    assert answers_of(llm, prompts, GREEDY) == plain
    assert len(set(ran)) == 2 and accepted(verified) > (5 if drafter == "eagle3" else 100)


def test_identity_of_a_union_whose_drafter_goes_on_and_off(start, checkpoints, prompts, plain, toggled, verified):
    llm = start(union(checkpoints))
    ran = toggled(budget_of(llm))
    assert answers_of(llm, prompts, GREEDY) == plain
    assert set(ran) == {*budget_of(llm).arms, True, False} and accepted(verified) > 100


def test_seeded_sampling_and_chunked_prefill(engine, start, checkpoints, prompts, toggled):
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=30, ignore_eos=True) for i in range(len(prompts))]
    expected = answers_of(engine(), prompts, params)
    small = {"max_num_batched_tokens": 48, "max_num_seqs": 4, "block_size": 32}
    llm = start(eagle(checkpoints), **small, enable_prefix_caching=True)
    toggled(budget_of(llm))
    assert answers_of(llm, prompts, params) == expected


def test_preemption_while_paused(engine, start, checkpoints, prompts, toggled):
    long = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    expected = answers_of(engine(block_size=32), prompts[:16], long)
    llm = start(eagle(checkpoints), block_size=32, num_gpu_blocks_override=14)
    toggled(budget_of(llm))
    assert answers_of(llm, prompts[:16], long) == expected
    assert counters(llm)["preemptions"] > 0


# ---- the drafter catches up


def agreement(monkeypatch, start, checkpoints, prompts, toggled, drafter="eagle", **options):
    """Return the share of the drafts after a pause that are the same as without it, and the number of empty ones."""
    llm = start(eagle(checkpoints, drafter), **options)
    always = record_drafts(monkeypatch)
    budget = budget_of(llm)
    toggled(budget)
    monkeypatch.setattr(budget, "plan", lambda *_: Plan(budget.arms[-1]))
    llm.generate(prompts, GREEDY, use_tqdm=False)
    monkeypatch.undo()
    sometimes = record_drafts(monkeypatch)
    toggled(budget)
    llm.generate(prompts, GREEDY, use_tqdm=False)
    both = [(always[context], sometimes[context]) for context in set(always) & set(sometimes)]
    drafted = [before == after for before, after in both if len(after) > 1]
    assert len(drafted) > 50
    return np.mean(drafted), len(both) - len(drafted)


@pytest.mark.parametrize("drafter", ["eagle", "eagle3", "reduced"])
def test_drafts_after_a_pause_are_the_same_as_without(monkeypatch, start, checkpoints, prompts, toggled, drafter):
    share, empty = agreement(monkeypatch, start, checkpoints, prompts, toggled, drafter)
    assert share > 0.98 and empty == 0


def test_a_pause_longer_than_what_is_kept(monkeypatch, start, checkpoints, prompts, plain, toggled):
    """Requests that do not fit get no drafts; those of the others are the same as without a pause."""
    options = {"max_num_batched_tokens": 64, "max_num_seqs": 4}
    share, empty = agreement(monkeypatch, start, checkpoints, prompts, toggled, **options)
    assert share > 0.98 and empty > 10
    llm = start(eagle(checkpoints), **options)
    assert answers_of(llm, prompts, GREEDY) == plain
    missed = runner_of(llm).drafter.missed
    assert not missed.unread - set(runner_of(llm).requests) and missed.num_rows <= 64


# ---- decisions


def test_planted_costs_make_it_draft_all_or_nothing(start, checkpoints, prompts, plain, verified, monkeypatch):
    """A further row costs nothing, or as much as the first one."""
    llm = start(eagle(checkpoints), max_num_seqs=2)
    budget, counts = budget_of(llm), []
    monkeypatch.setattr(StepCost, "observe_step", lambda *_: None)
    monkeypatch.setattr(StepCost, "observe_part", lambda *_: None)
    for slope in (0.0, 1.0):
        cheap = dict.fromkeys(("read", "level"), {1: 1e-6})
        cost = StepCost({"verify": {1: 10.0, 2: 10.0 * (1 + slope)}, **cheap}, 26)
        monkeypatch.setattr(budget, "cost", cost)
        verified.clear()
        assert answers_of(llm, prompts[:12], GREEDY) == plain[:12]
        counts.append(sum(nodes for nodes, _ in verified))
    assert counts[0] > 1000 and counts[1] < counts[0] / 20


def test_a_paused_step_is_a_plain_one(monkeypatch, start, checkpoints, prompts, plain, toggled):
    """No tree attention, no walk, no drafter."""
    llm = start(eagle(checkpoints))
    toggled(budget_of(llm))
    monkeypatch.setattr(budget_of(llm), "plan", lambda *_: Plan(PLAIN))
    llm.generate(prompts[:1], GREEDY, use_tqdm=False)  # the last drafts of earlier steps

    def fail(*_args, **_kwargs):
        raise AssertionError("a paused step does not come here")

    monkeypatch.setattr(TreeCPUModelRunner, "_stage", fail)
    monkeypatch.setattr(TreeCPUModelRunner, "_walker", fail)
    monkeypatch.setattr(runner_of(llm).drafter.model, "forward", fail)
    monkeypatch.setattr(runner_of(llm).drafter.operator, "first", fail)
    assert answers_of(llm, prompts, GREEDY) == plain


def test_drafts_are_pruned_by_the_operator():
    """A step has no time for the torch form, which takes eight times as long."""
    assert cpu_budget.prune is tree_ops.prune


# ---- measuring


def test_costs_are_measured_saved_and_taken_up_again(start, checkpoints, prompts, monkeypatch):
    """With the corrections that were learned while serving."""
    monkeypatch.setattr(cpu_budget, "TOO_SLOW", float("inf"))  # other tests may run beside this one
    llm = start(eagle(checkpoints))
    serving = runner_of(llm).serving_budget
    measured = serving.budget.cost.measured
    assert set(measured) == {"verify", "read", "level"} and measured["verify"][1] > 1e-5
    before = saved.load(StepCost, serving.facts, 64).plain(1)
    llm.generate(prompts[:4], GREEDY, use_tqdm=False)
    saved.save(serving.facts, serving.budget.cost)
    budget, serving.budget = serving.budget, None
    serving.prepare()
    assert serving.budget.cost.plain(1) == pytest.approx(budget.cost.plain(1)) != before
    serving.budget = budget


def test_costs_of_a_busy_machine_are_measured_again(start, checkpoints):
    serving = runner_of(start(eagle(checkpoints))).serving_budget
    budget = serving.budget
    measured = budget.cost.measured.items()
    slow = {part: {rows: 100 * seconds for rows, seconds in points.items()} for part, points in measured}
    saved.save(serving.facts, StepCost(slow, serving._most_rows))
    serving.prepare()
    found, serving.budget = serving.budget.cost.measured["verify"][1], budget
    assert found < slow["verify"][1] / 10 and saved.load(StepCost, serving.facts, 64).measured["verify"][1] == found


def test_requests_without_drafts_are_counted(start, checkpoints, prompts, monkeypatch):
    llm = start(eagle(checkpoints))
    budget, counts = budget_of(llm), runner_of(llm)._counters
    off = SamplingParams(max_tokens=8, ignore_eos=True, extra_args={"speculation": False})
    for arm in (PLAIN, budget.arms[-1]):
        monkeypatch.setattr(budget, "plan", lambda *_, arm=arm: Plan(arm))
        before = counts.values()[_INDEX["turned off by the request"]]
        llm.generate(prompts[:2], off, use_tqdm=False)
        assert counts.values()[_INDEX["turned off by the request"]] == before + 2 * 8


def test_missed_rows():
    missed = MissedRows(10)
    missed.add(["a", "b"], torch.arange(6).view(3, 2), [0, 5], [2, 1])
    missed.add(["b"], torch.tensor([[9, 9]]), [6], [1])
    assert missed.num_rows == 4
    missed.add(["a"], torch.tensor([[7, 7]]), [1], [1])  # computed again from token 1: the rows kept are outdated
    assert missed.num_rows == 3
    taken = missed.take(["x", "a", "b"])
    assert [(place, start, rows.tolist()) for place, start, rows in taken] == [
        (1, 1, [[7, 7]]),
        (2, 5, [[4, 5], [9, 9]]),
    ]
    assert missed.num_rows == 0 and missed.take(["a", "b"]) == []


def test_rows_that_do_not_fit():
    missed = MissedRows(10)
    assert missed.admit(["a", "b", "c"], np.array([4, 7, 6])).tolist() == [True, False, True]
    missed.add(["a", "c"], torch.zeros(10, 2), [0, 0], [4, 6])
    assert missed.admit(["a", "b", "c"], np.array([1, 1, 1])).tolist() == [False, False, False]
    assert missed.unread == {"a", "b", "c"} and missed.num_rows == 0
    missed.finish(["b"])
    assert missed.unread == {"a", "c"} and missed.admit(["b"], np.array([3])).all()


def test_the_warm_up_ends_in_time(start, checkpoints, monkeypatch):
    runner, rows = runner_of(start(eagle(checkpoints))), []
    monkeypatch.setattr(runner.serving_budget, "_run_target", rows.append)
    monkeypatch.setattr(runner.drafter, "run_forward", lambda *args, **kwargs: None)
    runner.serving_budget._warm_up()
    assert rows == [*range(1, len(rows) + 1)] and len(rows) > 8
    rows.clear()
    monkeypatch.setattr(cpu_budget, "WARM_SECONDS", -1.0)
    runner.serving_budget._warm_up()
    assert not rows
