"""Shapes of rounds as arms: their numbers of nodes, their times and gains, and the choice."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_specplug.budget.acceptance import ShapeAcceptance, rising
from vllm_specplug.budget.choose import ShapeBudget
from vllm_specplug.budget.cost import RoundCost
from vllm_specplug.budget.shapes import shapes_of

SHAPES = shapes_of(63, 6, 10)
#: Per shape: seconds of one request, and of each further one.
COSTS = {
    0: (1.0, 0.01),
    1: (1.15, 0.03),
    3: (1.17, 0.05),
    7: (1.2, 0.1),
    15: (1.3, 0.2),
    31: (1.4, 0.4),
    63: (1.6, 0.8),
}
#: Accepted nodes of a drafter that is worth its time.
ACCEPTED = {0: 0.0, 1: 0.6, 3: 1.1, 7: 1.6, 15: 2.1, 31: 2.6, 63: 3.0}


def times(costs=COSTS):
    return RoundCost({nodes: {count: a + b * count for count in (1, 8, 64)} for nodes, (a, b) in costs.items()}, 64)


def drive(budget, num_reqs, accepted, steps, lag=1, costs=COSTS, learns=True):
    """Run steps whose outcomes come ``lag`` steps late; return the shapes that ran."""
    chosen, waiting = [], []
    for _ in range(steps):
        nodes = budget.plan(num_reqs)
        chosen.append(nodes)
        waiting.append(nodes)
        if len(waiting) > lag:
            done = waiting.pop(0)
            if learns:
                budget.learn(done, accepted[done] * num_reqs, num_reqs)
            budget.cost.observe(done, num_reqs, sum(np.array(costs[done]) * (1, num_reqs)))
    return chosen


def test_shapes_of_a_configuration():
    found = [(shape.nodes, shape.depth) for shape in SHAPES]
    assert found == [(1, 1), (3, 3), (7, 4), (15, 5), (31, 6), (63, 6)]
    assert [shape.nodes for shape in shapes_of(60, 6, 10)] == [1, 3, 7, 15, 31, 60]
    assert [shape.nodes for shape in shapes_of(8, 6, 3)] == [1, 3, 8]  # 7 nodes would save nothing
    assert [shape.nodes for shape in shapes_of(16, 6, 3)] == [1, 3, 7, 16]


def test_levels_hold_the_nodes():
    for num_nodes, depth, top_k in ((63, 6, 10), (15, 15, 1), (30, 8, 2), (12, 4, 3)):
        for shape in shapes_of(num_nodes, depth, top_k):
            assert shape.depth <= depth and shape.nodes <= top_k + (shape.depth - 1) * top_k**2
    # Levels that cost nothing are all drafted.
    assert [shape.depth for shape in shapes_of(16, 6)] == [1, 3, 6, 6]


def test_acceptance_follows_outcomes_and_shapes_share_them():
    table = ShapeAcceptance(SHAPES)
    assert table.at(7) < table.at(63)
    before = table.at(31)
    for _ in range(40):
        table.learn(15, 0.0, 8)
    assert table.at(15) < 0.1 and table.at(31) < 0.5 * before
    for _ in range(160):
        table.learn(15, 8 * 2.5, 8)
    assert table.at(15) == pytest.approx(2.5, rel=0.1)
    assert table.at(7) <= table.at(15) <= table.at(31) <= table.at(63)


def test_smaller_shapes_that_were_not_seen_do_not_hold_up_a_larger_one():
    """15 nodes gave nothing, so that fewer give nothing: 1 and 3 were expected to give some."""
    table = ShapeAcceptance(SHAPES)
    for _ in range(20):
        table.learn(15, 0.0, 3)
    assert table.at(15) < 0.05 and table.at(1) <= table.at(3) <= table.at(7) <= table.at(15)


def test_rising_values():
    variances = np.array([1.0, 1.0, 3.0, 1.0])
    assert rising(np.array([0.0, 1.0, 2.0, 3.0]), variances).tolist() == [0, 1, 2, 3]
    assert rising(np.array([4.0, 0.0, 8.0, 4.0]), variances).tolist() == [2, 2, 5, 5]
    assert rising(np.array([3.0, 2.0, 1.0, 9.0]), np.ones(4)).tolist() == [2, 2, 2, 9]


def test_one_request_says_less_than_many():
    few, many = ShapeAcceptance(SHAPES), ShapeAcceptance(SHAPES)
    few.learn(7, 0, 1)
    many.learn(7, 0, 64)
    assert many.at(7) < few.at(7)


def test_plain_steps_say_what_all_steps_take_beyond_the_table():
    known = times()
    before = known.at(31, 8)
    for _ in range(200):
        known.observe(0, 8, 1.08 + 0.5)
    assert known.at(0, 8) == pytest.approx(1.08 + 0.5, rel=0.02)
    assert known.at(31, 8) == pytest.approx(before + 0.5, rel=0.02)


def test_a_shape_that_takes_longer_than_measured_is_learned_alone():
    known = times()
    plain = known.at(0, 8)
    for _ in range(200):
        known.observe(7, 8, 3.0)
        known.observe(0, 8, plain)
    assert known.at(7, 8) == pytest.approx(3.0, rel=0.05) and known.at(0, 8) == pytest.approx(plain, rel=0.03)


def test_step_times_need_plain_steps():
    with pytest.raises(ValueError, match="plain steps are missing"):
        RoundCost({7: {1: 1.0}}, 8)


def test_large_batches_draft_less():
    budget = ShapeBudget(times(), SHAPES, 10**6)
    assert drive(budget, 1, ACCEPTED, 300)[-50:].count(15) > 40
    assert drive(budget, 8, ACCEPTED, 300)[-50:].count(3) > 40
    assert drive(budget, 64, ACCEPTED, 300)[-50:].count(0) > 40


def test_worthless_drafts_stop_and_good_ones_come_back():
    budget = ShapeBudget(times(), SHAPES, 10**6)
    nothing = dict.fromkeys(ACCEPTED, 0.0)
    assert drive(budget, 4, ACCEPTED, 100)[0] > 0
    assert drive(budget, 4, nothing, 200)[-50:].count(0) > 45
    assert drive(budget, 4, ACCEPTED, 600)[-50:].count(0) < 5


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_outcomes_may_be_late(lag):
    budget = ShapeBudget(times(), SHAPES, 10**6)
    assert drive(budget, 2, dict.fromkeys(ACCEPTED, 0.0), 100, lag)[-50:].count(0) > 45


def test_early_steps_are_plain_whatever_pays():
    """Only they show whether plain steps still take the time in the file."""
    chosen = drive(ShapeBudget(times(), SHAPES, 10**6), 1, ACCEPTED, 140)
    assert [step for step, nodes in enumerate(chosen, start=1) if nodes == 0] == [8, 32, 132]


def test_shapes_without_room_do_not_run():
    budget = ShapeBudget(times(), SHAPES, 40)
    assert set(drive(budget, 4, ACCEPTED, 100)) <= {0, 1, 3, 7}
    assert set(drive(budget, 21, ACCEPTED, 100)) == {0}


def test_control_without_outcomes_it_goes_on():
    budget = ShapeBudget(times(), SHAPES, 10**6)
    nothing = dict.fromkeys(ACCEPTED, 0.0)
    assert drive(budget, 4, nothing, 200, learns=False)[-50:].count(0) < 5
