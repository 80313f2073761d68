"""Drafts lose at most a share of the serving time, from the first step on; drafts that pay are not held back."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.budget.test_budget import BOTH, CHEAP, EAGLE, make, run
from vllm_specplug.budget.arms import PLAIN, Arm
from vllm_specplug.budget.lost_time import FIRST_STEPS, MOST_STEPS, SHARE, LostTime

STEP = 0.02
SWIFT = Arm("swift", model=True, model_free=False)


def lost_in(budget, num_reqs, probabilities, steps, draft_seconds):
    """Run steps; return the arms, and the seconds lost to plain steps: drafts and verified rows, less accepted ones."""
    plain, lost = budget.costs.plain_step(num_reqs), []
    spend, accept = budget.lost_time.spend, budget.lost_time.accept
    budget.lost_time.spend = lambda seconds: lost.append(seconds) or spend(seconds)
    budget.lost_time.accept = lambda tokens, count: lost.append(-tokens * plain / count) or accept(tokens, count)
    arms, _ = run(budget, num_reqs, probabilities, steps, draft_seconds=draft_seconds)
    budget.lost_time.spend, budget.lost_time.accept = spend, accept
    return arms, sum(lost), plain


def test_it_is_earned_spent_and_paid_back():
    lost_time = LostTime()
    lost_time.begin_step(STEP)
    first = (FIRST_STEPS + SHARE) * STEP
    assert lost_time.allows(first) and not lost_time.allows(1.01 * first)
    lost_time.spend(3 * first)
    assert not lost_time.allows(0.0)
    for _ in range(int(2.1 * first / (SHARE * STEP))):
        lost_time.begin_step(STEP)
    assert lost_time.allows(0.0)
    lost_time.accept(8, 4)  # two plain steps' worth
    assert lost_time.allows(2 * STEP) and not lost_time.allows(2.2 * STEP)
    lost_time.accept(1000, 4)
    assert lost_time.left == pytest.approx(MOST_STEPS * STEP)


def test_only_a_drafter_that_is_known_to_pay_may_owe():
    lost_time = LostTime()
    lost_time.begin_step(STEP)
    lost_time.spend(2 * STEP)
    assert lost_time.allows(STEP, is_known=True) and not lost_time.allows(STEP)
    lost_time.spend(MOST_STEPS * STEP)
    assert not lost_time.allows(0.0, is_known=True)


@pytest.mark.parametrize("num_reqs", [1, 4, 16])
@pytest.mark.parametrize("draft_seconds", [0.002, 0.01, 0.05])
def test_the_first_hundred_steps_lose_two_percent_at_most(num_reqs, draft_seconds):
    """Nothing is accepted; each draft takes what was measured at start."""
    costs = {**CHEAP, "row": 0.002, "first_pass": draft_seconds - 2e-5}
    arms, lost, plain = lost_in(make(costs, max_levels=1), num_reqs, [0.01], 100, draft_seconds)
    assert 0 <= lost <= 0.02 * 100 * plain
    if draft_seconds < plain:
        assert EAGLE in arms


def test_a_share_is_lost_in_the_long_run():
    costs = {**CHEAP, "row": 0.004, "first_pass": 0.01}
    _, lost, plain = lost_in(make(costs, max_levels=1), 4, [0.01], 3000, 0.01)
    assert lost <= (FIRST_STEPS + SHARE * 3000) * plain


@pytest.mark.parametrize("num_reqs", [1, 4])
def test_a_drafter_that_pays_is_not_held_back(num_reqs):
    costs = {**CHEAP, "row": 5e-4, "first_pass": 0.005}
    budget = make(costs, max_levels=1)
    arms, lost, plain = lost_in(budget, num_reqs, [0.8, 0.8], 100, 0.005)
    assert arms.count(EAGLE) > 90 and lost < -0.3 * 100 * plain


def test_a_short_draft_is_tried_of_a_drafter_whose_whole_draft_costs_too_much():
    """SWIFT: a chain may take ten plain steps, its first token half of one."""
    costs = {**CHEAP, "first_pass": 10 * STEP}
    assert make(costs, (SWIFT,), max_levels=1).plan(1) is PLAIN
    budget = make(costs, (SWIFT,), max_levels=1, shortest_draft=0.5)
    assert budget.plan(1) is SWIFT
    assert budget.planner.may_spend(0.5 * STEP) and not budget.planner.may_spend(2 * STEP)


def test_a_unions_drafter_waits_while_no_time_may_be_lost():
    budget = make({**CHEAP, "first_pass": 0.005}, (Arm("without", model=False, model_free=True), BOTH))
    ran = []
    for spent in (0.0, 2 * STEP):
        budget.plan(1)
        budget.lost_time.spend(spent)
        ran.append(budget.wants_model_drafter(np.zeros(1), np.ones(1, dtype=bool)))
    assert ran == [True, False]


def test_a_disturbed_draft_is_not_charged_whole():
    budget = make({**CHEAP, "first_pass": 0.001}, max_levels=1)
    _, lost, plain = lost_in(budget, 1, [0.01], 1, 1.0)
    assert 0 < lost < 0.2 * plain
