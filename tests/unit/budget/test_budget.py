"""The measured budget chooses none, few or many nodes by planted costs and acceptance probabilities."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from vllm_specplug.budget.arms import PLAIN, Arm, best_sums
from vllm_specplug.budget.budget import Budget
from vllm_specplug.budget.calibration import LOGIT_LIMIT, log_odds_of, sigmoid
from vllm_specplug.budget.costs import CostModel
from vllm_specplug.budget.outcomes import outcomes_of
from vllm_specplug.budget.planner import CHOSEN_STEPS
from vllm_specplug.budget.selector import keep_best, node_values
from vllm_specplug.core.pruning import prune
from vllm_specplug.core.tree import from_flat
from vllm_specplug.types import Draft

EAGLE = Arm("eagle2", model=True, model_free=False)
LOOKUP = Arm("lookup", model=False, model_free=True)
ALONE, BOTH = Arm("without the drafter", model=False, model_free=True), Arm("union", model=True, model_free=True)
#: Seconds of a step of one row, one more row, the drafter's first pass, one level of it, a model-free proposer.
CHEAP = {"step": 0.02, "row": 1e-5, "first_pass": 1e-4, "level": 1e-4, "model_free": 1e-5}
LIMITS = {"rows": 300, "requests": 64}
EXPENSIVE = {"step": 0.02, "row": 0.02, "first_pass": 1e-2, "level": 1e-2, "model_free": 1e-2}


def cost_model(step, row, first_pass, level, model_free):
    def line(base, slope):
        return {1: base, 300: base + 299 * slope}

    measured = {
        "verify": line(step, row), "between_steps": line(1e-5, 0), "first_pass": line(first_pass, 0),
        "level": line(level, 0), "model_free": line(model_free, 0), "sample": line(1e-5, 0), "tree": line(1e-5, 0),
        "draft_overhead": line(1e-5, 0),
    }  # fmt: skip
    return CostModel(measured, LIMITS)


def make(costs, arms=(EAGLE,), **changes):
    settings = {"num_nodes": 8, "max_levels": 6, "level_width": 3, "max_rows": 300}
    return Budget(cost_model(**costs), arms, **{**settings, **changes})


def chains(num_reqs, probabilities):
    """One chain per request with the given confidences."""
    count = len(probabilities)
    token_ids = torch.arange(count + 1).repeat(num_reqs, 1)
    parents = torch.arange(-1, count).repeat(num_reqs, 1)
    tree = from_flat(token_ids, parents, torch.full((num_reqs,), count + 1))
    values = torch.tensor([0.0, *np.cumsum(np.log(probabilities))], dtype=torch.float32)
    return Draft(tree, values.repeat(num_reqs, 1))


def names(num_reqs):
    return [f"r{i}" for i in range(num_reqs)]


def run(budget, num_reqs, probabilities, steps, truth=None, draft_seconds=1e-3):
    """Run steps by the budget's decisions; return the arms that ran and the numbers of nodes verified.

    The target's tokens are the chain's up to a depth drawn from ``truth``, then another one.
    """
    rng = np.random.default_rng(0)
    arms, verified = [], []
    wanted, num_tokens = np.ones(num_reqs, dtype=bool), np.full(num_reqs, 5)
    for _ in range(steps):
        arms.append(budget.plan(num_reqs))
        verified.append(0)
        if arms[-1] is PLAIN:
            continue
        seconds = draft_seconds * arms[-1].model
        draft = budget.select(
            chains(num_reqs, probabilities), names(num_reqs), num_tokens, wanted, seconds, by_model=seconds
        )
        verified[-1] = int((draft.tree.num_rows - 1).sum())
        chain = np.arange(1, len(probabilities) + 1)
        chances = np.array(truth or probabilities)
        accepted = (rng.random((num_reqs, len(chances))) < chances).cumprod(axis=1).sum(axis=1)
        emitted = np.minimum(accepted, draft.tree.num_rows.numpy() - 1) + 1
        token_ids = np.zeros((num_reqs, 5 + len(chain) + 1), dtype=np.int32)
        token_ids[:, 5:-1] = np.where(chain <= accepted[:, None], chain, 99)
        budget.lost_time.accept(int((emitted - 1).sum()), num_reqs)
        budget.learn(names(num_reqs), token_ids, num_tokens + emitted)
    return arms, verified


@pytest.mark.parametrize("num_reqs", [1, 4, 16])
def test_nothing_where_drafts_cost_too_much(num_reqs):
    budget = make(EXPENSIVE)
    arms, verified = run(budget, num_reqs, [0.6, 0.5, 0.3, 0.2], 400, draft_seconds=0.05)
    assert sum(arm is PLAIN for arm in arms[20:]) > 0.95 * 380
    assert sum(verified) == 0


@pytest.mark.parametrize("num_reqs", [1, 4, 16])
def test_everything_where_it_is_free(num_reqs):
    arms, verified = run(make(CHEAP), num_reqs, [0.9, 0.8, 0.8, 0.7], 60)
    assert all(arm is EAGLE for arm in arms) and all(count == 4 * num_reqs for count in verified)


def test_what_a_trees_forward_costs_beside_its_rows_counts():
    arms = []
    for per_term in ({}, {"trees": 0.1}):
        costs = CostModel(cost_model(**CHEAP).measured_in(cost_model(**CHEAP).to_json()), LIMITS, {"verify": per_term})
        budget = Budget(costs, (EAGLE,), num_nodes=8, max_levels=6, level_width=3, max_rows=300)
        arms.append(run(budget, 4, [0.9, 0.8, 0.8, 0.7], 60)[0])
    assert all(arm is EAGLE for arm in arms[0])
    assert sum(arm is PLAIN for arm in arms[1]) > 40


@pytest.mark.parametrize("max_rows", [1, 2, 3])
def test_steps_with_room_for_few_nodes(max_rows):
    """One request, levels drafted one by one: the cost of nodes that no step has room for is not read."""
    costs = CostModel({"verify": {1: 0.02, 2: 0.021}}, {"rows": max_rows, "requests": 1})
    budget = Budget(costs, (EAGLE,), num_nodes=1, max_levels=3, level_width=1, max_rows=max_rows)
    wanted, num_tokens = np.ones(1, dtype=bool), np.full(1, 5)
    for _ in range(8):
        if budget.plan(1) is EAGLE:
            budget.growth.beams = [0.9] if budget.level_floors(2, 1)[0] < 0.9 else []
            kept = budget.select(chains(1, [0.9, 0.9]), names(1), num_tokens, wanted, 1e-3)
            assert kept.tree.num_rows.item() <= max_rows
            budget.lost_time.accept(1, 1)
    assert budget.growth.beams


def test_few_where_rows_cost_time():
    """At 20 ms a step and 4 ms a row, a node needs a value of about 0.2 tokens times the speedup."""
    _, verified = run(make({**CHEAP, "row": 0.004}), 1, [0.9, 0.6, 0.4, 0.1], 100)
    assert 1 <= np.mean(verified[20:]) <= 2.5


def test_fewer_the_larger_the_batch_and_no_cliff():
    """Rows cost nothing up to 16, as on a memory-bound machine, and much from there on."""
    measured = {"verify": {1: 0.02, 16: 0.02, 300: 0.02 + 284 * 0.0015}}
    shares = []
    for num_reqs in (1, 2, 4, 8, 12, 16, 32):
        budget = Budget(
            CostModel({**measured, "first_pass": {1: 1e-4, 300: 1e-4}}, {"rows": 300, "requests": 64}),
            (EAGLE,), num_nodes=8, max_levels=1, level_width=3, max_rows=300,
        )  # fmt: skip
        _, verified = run(budget, num_reqs, [0.8, 0.7, 0.6, 0.5, 0.4, 0.3], 60)
        shares.append(np.mean(verified[20:]) / num_reqs)
    assert shares[0] > 4 and shares[-1] < 2
    assert all(later <= earlier + 0.3 for earlier, later in zip(shares, shares[1:], strict=False))


def test_the_best_of_the_whole_batch():
    """Two sure nodes of one request go before one doubtful node of each."""
    budget = make({**CHEAP, "row": 0.008})
    budget.plan(2)
    draft = chains(2, [0.9, 0.85, 0.1])
    values = draft.log_values.clone()
    values[1, 1:] = torch.tensor([math.log(0.2), math.log(0.1), math.log(0.01)])
    kept = budget.select(Draft(draft.tree, values), names(2), np.full(2, 5), np.ones(2, dtype=bool), 0.0)
    assert kept.tree.num_rows.tolist() == [3, 1]


def test_most_rows_of_a_step():
    _, verified = run(make(CHEAP, max_rows=20), 8, [0.9, 0.9, 0.9], 10)
    assert max(verified) == 12
    assert run(make(CHEAP, max_rows=8), 8, [0.9], 40)[1] == [0] * 40


def test_it_learns_that_a_drafter_is_overconfident():
    """Confidences of 0.9 that come true in one of ten cases: verification stops, the reliability curve says why."""
    budget = make({**CHEAP, "row": 0.004, "level": 1e-3})
    arms, verified = run(budget, 1, [0.9, 0.9, 0.9, 0.9], 600, truth=[0.1] * 4)
    assert max(verified[:20]) >= 2 and np.mean(verified[-200:]) < 1
    _, predicted, accepted = budget.reliability.curve()[-1]
    assert predicted > 0.8 and accepted < 0.3


def test_drafting_resumes_when_it_is_fast_again():
    """Drafting pauses while drafts are wrong; a trial finds that they are right again."""
    budget = make({**CHEAP, "row": 0.001, "first_pass": 0.002, "level": 0.001})
    arms, _ = run(budget, 1, [0.03, 0.01], 400, draft_seconds=0.004)
    paused = [arm is PLAIN for arm in arms]
    assert sum(paused[-200:]) > 150 and not all(paused[-200:])
    arms, verified = run(budget, 1, [0.9, 0.9, 0.8], 400, draft_seconds=0.004)
    assert sum(arm is EAGLE for arm in arms[-200:]) > 190 and np.mean(verified[-200:]) > 2


def test_trials_cost_little():
    budget = make({**CHEAP, "row": 0.004, "first_pass": 0.004, "level": 0.002})
    arms, _ = run(budget, 4, [0.05], 3000, draft_seconds=0.006)
    lost = sum(arm is not PLAIN for arm in arms[200:]) * 0.006
    assert 0 < lost < 0.01 * 2800 * 0.02


def test_a_union_leaves_a_drafter_out_that_is_not_worth_its_time():
    costs = {**CHEAP, "first_pass": 0.02, "level": 0.02}
    arms, _ = run(make(costs, (ALONE, BOTH)), 2, [0.7, 0.7], 600, draft_seconds=0.02)
    assert sum(arm is ALONE for arm in arms[-200:]) > 190 and BOTH in arms


def test_a_union_drafts_with_all_where_the_drafter_is_cheap():
    arms, _ = run(make(CHEAP, (ALONE, BOTH)), 1, [0.7, 0.7], 100)
    assert arms.count(PLAIN) == 1


def test_levels_grow_while_they_are_worth_their_cost():
    budget = make({**CHEAP, "level": 0.002})
    budget.plan(1)
    floors = budget.level_floors(5, 3)
    assert len(floors) == 5 and all(0.06 < floor < 1 for floor in floors)


def test_no_level_follows_where_no_time_may_be_lost():
    budget = make({**CHEAP, "level": 0.002})
    budget.plan(1)
    usual = budget.forecast.usual_draft(budget.running, 1, 3, 0) + budget.costs["level"].at(3)
    budget.planner.may_spend = lambda seconds: seconds < usual
    floors = budget.level_floors(5, 3)
    assert max(floors[:2]) < 1 and floors[2:] == [math.inf] * 3
    assert budget.level_floors(0, 3) == []


def test_trials_wait_while_the_drafter_has_much_to_catch_up_with():
    arms = []
    for missed in (0, 300):
        budget = make({**CHEAP, "row": 0.004, "first_pass": 0.004, "level": 0.002})
        budget.costs["first_pass"].seconds[300] = 0.5
        run(budget, 4, [0.05], 300, draft_seconds=0.006)
        arms.append([budget.plan(4, missed) for _ in range(100)])
    assert EAGLE in arms[0] and EAGLE not in arms[1]


def test_a_paused_drafter_comes_back_for_more_than_it_must_catch_up_with():
    """Drafting is a tenth faster again; it stays paused if catching up takes longer than this saves in 100 steps."""
    found = []
    for missed in (0, 3000):  # more than the drafter's costs are known for
        budget = make({**CHEAP, "row": 0.004, "first_pass": 0.004, "level": 0.002})
        run(budget, 4, [0.05], 300, draft_seconds=0.006)
        assert budget.arm is PLAIN
        plain = budget.forecast.outlooks(4)[PLAIN]
        budget.forecast.outlooks = lambda _num_reqs, plain=plain: {
            PLAIN: plain,
            EAGLE: replace(plain, tokens=1.1 * plain.tokens),
        }
        budget.reading.caught_up(0.2 * CHOSEN_STEPS * plain.seconds / 10, 300)
        budget.plan(4, missed)
        found.append(budget.arm)
    assert found == [EAGLE, PLAIN]


@pytest.mark.parametrize("looks", [True, False])
def test_a_plain_step_now_and_then_tells_what_it_costs(looks):
    """Plain steps look slower than they are, so drafting looks faster; the control never observes a plain step."""
    budget = make({**CHEAP, "first_pass": 0.004})
    arms = []
    for _ in range(20):
        found, _ = run(budget, 1, [0.4], 100, draft_seconds=0.004)
        arms += found
        for _ in range(looks * found.count(PLAIN)):
            budget.costs["verify"].observe(1, 0.008)
    assert arms[0] is EAGLE and arms[:100].count(PLAIN) < 5
    assert (arms[-100:].count(PLAIN) > 90) == looks


def test_prompts_are_part_of_a_drafters_cost():
    """Short answers to long prompts: the drafter takes more time for the prompts than its drafts save."""
    costs = {**CHEAP, "row": 0.004}
    budget = make(costs)
    budget.costs["first_pass"].seconds[:] = 1e-4 * np.arange(301)
    run(budget, 1, [0.8, 0.5], 50)
    assert budget.plan(1) is EAGLE
    for _ in range(300):
        budget.reading.saw_prompt(400)
        budget.plan(1)
    assert budget.arm is PLAIN


def test_a_load_that_ends_leaves_nothing_behind():
    """Drafting is too slow at 32 requests; back at one request everything is drafted from the first step on."""
    measured = {
        "verify": {1: 0.02, 16: 0.02, 300: 2.0},
        "first_pass": {1: 1e-4, 300: 1e-4},
        "level": {1: 1e-4, 300: 1e-4},
    }
    costs = CostModel(measured, {"rows": 300, "requests": 64})
    budget = Budget(costs, (EAGLE,), num_nodes=8, max_levels=6, level_width=3, max_rows=300)
    for _ in range(3):
        arms, verified = run(budget, 1, [0.8, 0.8, 0.6], 30)
        assert all(arm is EAGLE for arm in arms) and np.mean(verified) > 2
        arms, _ = run(budget, 32, [0.8, 0.8, 0.6], 300, draft_seconds=0.05)
        assert sum(arm is PLAIN for arm in arms) > 270


def test_no_request_decodes():
    assert make(CHEAP).plan(0) is PLAIN


def test_what_it_knew_is_remembered():
    budget = make({**CHEAP, "row": 0.002})
    run(budget, 1, [0.9, 0.9, 0.9], 200)
    again = make({**CHEAP, "row": 0.002})
    again.regimes.remember(budget.regimes.to_json())
    assert again.forecast.outlooks(1)[EAGLE].tokens == pytest.approx(budget.forecast.outlooks(1)[EAGLE].tokens, rel=0.2)
    other = make(CHEAP, num_nodes=4)
    other.regimes.remember(budget.regimes.to_json())  # of another shape
    assert other.planner.regime.values[EAGLE].requests == 8


def test_forgets_requests():
    budget = make(CHEAP)
    run(budget, 2, [0.5], 10)
    assert set(budget.outcomes._records) == {"r0", "r1"}
    budget.finish(["r0", "unknown"])
    assert set(budget.outcomes._records) == {"r1"}


def test_what_was_not_verified_teaches_too():
    """Nothing is verified at first: the drafter's confidence is low. They are right, so later they are."""
    budget = make({**CHEAP, "row": 0.003})
    _, verified = run(budget, 1, [0.1, 0.1], 400, truth=[0.9, 0.9])
    assert verified[0] == 0 and np.mean(verified[-100:]) > 1.9


def beside(budget, num_reqs, expected, gain, steps, by_model=1e-2):
    """Run steps: other drafters expect so many tokens, and the model drafter adds a node of that probability."""
    ran = []
    wanted, num_tokens = np.ones(num_reqs, dtype=bool), np.full(num_reqs, 5)
    by_model_only = np.array([[False, True]]).repeat(num_reqs, axis=0)
    for _ in range(steps):
        budget.plan(num_reqs)
        ran.append(budget.wants_model_drafter(np.full(num_reqs, expected), wanted))
        seconds = by_model * ran[-1]
        budget.select(chains(num_reqs, [gain]), names(num_reqs), num_tokens, wanted, 1e-3, seconds, by_model_only)
    return np.mean(ran[-100:])


def test_the_model_drafter_runs_where_the_others_expect_little():
    """At 20 ms a step of up to two tokens, 5 ms are worth half a token; for less it is tried now and then."""
    budget = make(CHEAP, (ALONE, BOTH))
    assert beside(budget, 1, 0.0, 0.9, 50, by_model=5e-3) == 1.0
    refusing = beside(budget, 1, 5.0, 0.02, 1500, by_model=5e-3)
    assert 0.0 < refusing < 0.2
    assert budget.planner.regime.drafter.share < 0.3
    # What was learned of confident others says nothing of the rest.
    assert beside(budget, 1, 0.0, 0.9, 50, by_model=5e-3) == 1.0
    # In a batch of more, arms are compared; the one that was chosen runs.
    assert beside(budget, 4, 5.0, 0.02, 50, by_model=5e-3) == 1.0


@pytest.mark.parametrize(
    ("before", "steps"), [([(5e-2, 1)], 100), ([(5e-3, 50), (2e-1, 40)], 200)], ids=["the first call", "later"]
)
def test_a_disturbed_time_of_the_model_drafter_is_soon_forgotten(before, steps):
    """It runs in all of the last hundred steps."""
    budget = make(CHEAP, (ALONE, BOTH))
    for by_model, count in before:
        beside(budget, 1, 0.0, 0.9, count, by_model=by_model)
    assert beside(budget, 1, 0.0, 0.9, steps, by_model=5e-3) == 1.0


def test_trials_are_marked():
    budget = make(EXPENSIVE)
    tried = []
    for _ in range(400):
        running = budget.plan(1)
        assert budget.is_trial == (running is not budget.arm and not budget.planner.is_held)
        tried.append(budget.is_trial)
        if running is not PLAIN:
            budget.select(chains(1, [0.2]), names(1), np.full(1, 5), np.ones(1, dtype=bool), 1e-2)
    assert 0 < sum(tried[100:]) < 100
    beside(budget := make(CHEAP, (ALONE, BOTH)), 1, 5.0, 0.02, 1500, by_model=5e-3)
    ran = []
    for _ in range(600):
        budget.plan(1)
        if budget.running is BOTH:
            ran.append((budget.wants_model_drafter(np.full(1, 5.0), np.ones(1, dtype=bool)), budget.is_trial))
    assert (True, True) in ran and (False, False) in ran and (True, False) not in ran


def test_the_speed_of_a_large_batch_does_not_count_in_a_small_one():
    """A step of 16 requests emits many tokens a second; at that rate no row of a single request is worth its time."""
    costs, chain = {**CHEAP, "row": 0.004}, [0.7, 0.6, 0.4, 0.1]
    budget = make(costs)
    run(budget, 16, chain, 60)
    assert run(budget, 1, chain, 3)[1] == run(make(costs), 1, chain, 3)[1] != [0, 0, 0]


def random_trees(rng, num_reqs, width):
    """Trees of up to ``width`` rows, parents first, with log values that never grow along a path."""
    num_rows = rng.integers(1, width + 1, num_reqs)
    parents, depths = np.full((num_reqs, width), -1), np.zeros((num_reqs, width), dtype=np.int64)
    log_values = np.full((num_reqs, width), -np.inf, dtype=np.float32)
    log_values[:, 0] = 0.0
    for request in range(num_reqs):
        for row in range(1, num_rows[request]):
            parent = rng.integers(0, row)
            parents[request, row], depths[request, row] = parent, depths[request, parent] + 1
            edge = rng.choice([0.0, -np.inf, -0.1, -3.0, -50.0], p=[0.1, 0.05, 0.5, 0.3, 0.05])
            log_values[request, row] = log_values[request, parent] + edge
    return log_values, parents, depths, num_rows


def test_values_of_nodes():
    """Against the same in arrays: calibrated edges, multiplied from the root down."""
    rng = np.random.default_rng(0)
    for num_reqs, width in ((1, 1), (1, 9), (5, 12), (32, 25)):
        log_values, parents, depths, num_rows = random_trees(rng, num_reqs, width)
        wanted, records = rng.random(num_reqs) < 0.8, rng.normal(size=num_reqs)
        weights = rng.normal(size=4)
        features, nodes, values = node_values(
            log_values, parents, depths, num_rows, wanted, records, weights, LOGIT_LIMIT
        )
        assert (nodes == ((np.arange(width) > 0) & (np.arange(width) < num_rows[:, None]) & wanted[:, None])).all()
        for request, row in np.ndindex(num_reqs, width):
            if not 0 < row < num_rows[request]:
                assert values[request, row] == 0
                continue
            with np.errstate(invalid="ignore"):
                edge = np.fmin(np.float64(log_values[request, row]) - log_values[request, parents[request, row]], 0.0)
            expected = [1.0, float(log_odds_of(np.array(edge))), np.log2(depths[request, row]), records[request]]
            assert features[request, row] == pytest.approx(expected)
            above = 1.0 if parents[request, row] == 0 else values[request, parents[request, row]]
            value = above * float(sigmoid(np.array(np.dot(expected, weights))))
            assert values[request, row] == (pytest.approx(value) if wanted[request] else 0)


def test_the_nodes_that_are_kept():
    """Against every number of the best nodes, tried one by one."""
    rng = np.random.default_rng(1)
    counts = set()
    for _ in range(60):
        num_reqs, width = int(rng.integers(1, 5)), int(rng.integers(1, 12))
        values, nodes = rng.choice([0.9, 0.5, 0.3, 0.1], (num_reqs, width)), rng.random((num_reqs, width)) < 0.7
        verify, for_trees = np.cumsum(rng.uniform(0, 0.004, num_reqs * width + 1)), float(rng.uniform(0, 0.01))
        rate, most = float(rng.uniform(20, 200)), int(rng.integers(0, num_reqs * width + 1))
        best = sorted(values[nodes].tolist(), reverse=True)[:most]
        profits = [0.0] + [
            sum(best[:count]) - rate * (verify[count] - verify[0] + for_trees) for count in range(1, len(best) + 1)
        ]
        keep, count, gain, cost = keep_best(values, nodes, verify, for_trees, rate, most)
        assert gain - rate * cost == pytest.approx(max(profits)) == pytest.approx(profits[count])
        assert keep.sum() == count and not (keep & ~nodes).any() and values[keep].sum() == pytest.approx(gain)
        counts.add(min(count, 2))
    assert counts == {0, 1, 2}
    # Of equal ones the first are kept: a parent stands before its children.
    assert keep_best(np.full((1, 4), 0.5), np.ones((1, 4), bool), np.zeros(5), 0.0, 1.0, 2)[0].tolist() == [
        [1, 1, 0, 0]
    ]


def test_values_of_the_best_nodes():
    values = np.array([[0.0, 0.5, 0.9, 0.4], [0.0, 0.2, 0.0, 0.0]])
    depths = np.array([[0, 1, 1, 2], [0, 1, 0, 0]])
    sums = best_sums(values, depths, np.array([1, 2]), 2, 4)
    assert sums == pytest.approx(np.array([[0, 0.55, 0.8, 0.8, 0.8], [0, 0.55, 0.8, 1.0, 1.0]]))


def test_what_the_targets_tokens_say_of_nodes():
    # Two chains from the root (7, 8, 9 and 5, 6), a request that has gone, and one that has emitted nothing.
    drafted = np.array([[1, 7, 8, 9, 5, 6], [1, 2, -1, -1, -1, -1], [1, 3, -1, -1, -1, -1]])
    parents = np.array([[-1, 0, 1, 2, 0, 4], [-1, 0, -1, -1, -1, -1], [-1, 0, -1, -1, -1, -1]])
    features = np.arange(72.0).reshape(3, 6, 4) / 72
    weights, token_ids = np.array([0.1, -0.2, 0.3, 0.5]), np.array([[0, 0, 0], [1, 7, 4]], dtype=np.int32)
    places, starts, ends = np.array([1, -1, 0]), np.array([1, 1, 3]), np.array([3, 3])
    found, predicted, accepted, sums, emitted = outcomes_of(
        drafted, parents, features, weights, LOGIT_LIMIT, places, starts, token_ids, ends
    )
    # 7 was right; 8 was not, so that nothing is known of 9; 5 was not, nor is anything known of 6.
    assert found.tolist() == features[0, [1, 2, 4]].tolist() and accepted.tolist() == [True, False, False]
    assert predicted == pytest.approx(sigmoid(found @ weights))
    assert sums[0] == pytest.approx([1, sigmoid(found[:, :3] @ weights[:3]).sum(), 3]) and not sums[1:].any()
    assert emitted == 2.0
    # The target's tokens end there: what was right is all that is known.
    nothing = outcomes_of(drafted, parents, features, weights, LOGIT_LIMIT, places, starts, token_ids, np.array([3, 2]))
    assert nothing[2].tolist() == [True, False] and nothing[4] == 1.0


def test_prune():
    parents = torch.tensor([[-1, 0, 0, 1, 2, 3], [-1, 0, 1, -1, -1, -1]])
    tree = from_flat(torch.tensor([[9, 1, 2, 3, 4, 5], [8, 6, 7, 0, 0, 0]]), parents, torch.tensor([6, 3]))
    values = torch.tensor([[0.0, -1, -2, -3, -4, -5], [0.0, -1, -2, -9, -9, -9]])
    bits = torch.tensor([[0, 1, 2, 3, 1, 1], [0, 2, 2, 0, 0, 0]])
    keep = torch.tensor([[False, False, True, False, True, False], [False, True, False, True, True, True]])
    pruned = prune(Draft(tree, values, ("a", "b"), bits), keep)
    assert pruned.tree.token_ids.tolist() == [[9, 2, 4], [8, 6, -1]]
    assert pruned.tree.parents.tolist() == [[-1, 0, 1], [-1, 0, -1]]
    assert pruned.tree.depths.tolist() == [[0, 1, 2], [0, 1, 0]]
    assert pruned.tree.num_rows.tolist() == [3, 2]
    assert pruned.log_values.tolist() == [[0.0, -2.0, -4.0], [0.0, -1.0, float("-inf")]]
    assert pruned.source_bits.tolist() == [[0, 2, 1], [0, 2, 0]]
