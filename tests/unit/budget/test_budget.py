"""The measured budget chooses none, few or many nodes by planted costs and acceptance probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vllm_specplug.budget.acceptance import NodeAcceptance
from vllm_specplug.budget.choose import FIRST_LOSS, OVERHEAD, SHARE, Budget, StepRecord, Worth, best_nodes
from vllm_specplug.budget.cost import StepCost
from vllm_specplug.budget.planner import PLAIN, Arm, Outlook, Planner
from vllm_specplug.core.pruning import prune
from vllm_specplug.core.tree import from_flat
from vllm_specplug.types import Draft

EAGLE = Arm("eagle2", model=True, model_free=False)
ALONE, BOTH = Arm("without the drafter", model=False, model_free=True), Arm("union", model=True, model_free=True)
#: Seconds of a step of one row, one more row, the drafter's first forward, one level of it.
STEP = 0.02
CHEAP = {"step": STEP, "row": 1e-5, "read": 1e-4, "level": 1e-4}
EXPENSIVE = {"step": STEP, "row": 0.02, "read": 1e-2, "level": 1e-2}


def step_cost(step=STEP, row=1e-5, read=1e-4, level=1e-4):
    def line(base, slope):
        return {1: base, 300: base + 299 * slope}

    measured = {"verify": line(step, row), "read": line(read, 0), "level": line(level, 0)}
    return StepCost(measured, 300, {"verify": [1.0, 0.0, 0.0, 0.0, 0.0]})


def make(costs, arms=(EAGLE,), **changes):
    settings = {"num_nodes": 8, "max_levels": 6, "level_width": 3, "max_rows": 300}
    return Budget(costs if isinstance(costs, StepCost) else step_cost(**costs), arms, **{**settings, **changes})


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


def run(budget, num_reqs, probabilities, steps, truth=None, draft_seconds=1e-3, losses=None):
    """Run steps by the budget's decisions; return the arms that ran and the numbers of nodes verified.

    The target's tokens are the chain's up to a depth drawn from ``truth``, then another one.  ``losses`` gets the plain
    steps that each draft lost.
    """
    rng = np.random.default_rng(0)
    arms, verified = [], []
    wanted, num_tokens = np.ones(num_reqs, dtype=bool), np.full(num_reqs, 5)
    for _ in range(steps):
        arms.append(budget.plan(num_reqs).arm)
        verified.append(0)
        if arms[-1] is PLAIN:
            continue
        record = StepRecord(num_reqs=num_reqs, drafting=draft_seconds * (arms[-1].model or 0.01))
        draft = chains(num_reqs, probabilities)
        keep = budget.select(draft, names(num_reqs), num_tokens, wanted, record)
        verified[-1] = int(keep.sum())
        chain = np.arange(1, len(probabilities) + 1)
        accepted = (rng.random((num_reqs, len(chain))) < np.array(truth or probabilities)).cumprod(axis=1).sum(axis=1)
        emitted = np.minimum(accepted, keep.sum(axis=1)) + 1
        token_ids = np.zeros((num_reqs, 5 + len(chain) + 1), dtype=np.int32)
        token_ids[:, 5:-1] = np.where(chain <= accepted[:, None], chain, 99)
        record.num_nodes, record.num_accepted = verified[-1], int((emitted - 1).sum())
        if losses is not None:
            verify = budget.cost.verification(num_reqs)
            added = record.drafting + verify[verified[-1]] - verify[0]
            losses.append(float(added / verify[0]) - record.num_accepted / num_reqs)
        budget.learn(record, None)
        budget.acceptance.learn(names(num_reqs), token_ids, num_tokens + emitted)
    return arms, verified


@pytest.mark.parametrize("num_reqs", [1, 4, 16])
def test_nothing_where_drafts_cost_too_much(num_reqs):
    arms, verified = run(make(EXPENSIVE), num_reqs, [0.6, 0.5, 0.3, 0.2], 400, draft_seconds=0.05)
    assert sum(arm is PLAIN for arm in arms[20:]) > 0.95 * 380
    assert sum(verified) == 0


@pytest.mark.parametrize("num_reqs", [1, 4, 16])
def test_everything_where_it_is_free(num_reqs):
    arms, verified = run(make(CHEAP), num_reqs, [0.9, 0.8, 0.8, 0.7], 60)
    drafted = [count for arm, count in zip(arms, verified, strict=True) if arm is EAGLE]
    assert arms.count(PLAIN) == 2 and all(count == 4 * num_reqs for count in drafted)


def test_what_a_trees_forward_costs_beside_its_rows_counts():
    arms = []
    for trees in (0.0, 5.0):  # plain steps
        cost = StepCost(step_cost().measured, 300, {"verify": [1.0, 0.0, 0.0, 0.0, trees]})
        arms.append(run(make(cost), 4, [0.9, 0.8, 0.8, 0.7], 60)[0])
    assert arms[0].count(PLAIN) == 2 and arms[1].count(PLAIN) > 50


@pytest.mark.parametrize("max_rows", [1, 2, 3])
def test_steps_with_room_for_few_nodes(max_rows):
    cost = StepCost({"verify": {1: 0.02, 2: 0.021}, "read": {1: 1e-4}, "level": {1: 1e-4}}, max_rows)
    _, verified = run(make(cost, max_rows=max_rows, max_levels=3, level_width=1), 1, [0.9, 0.9], 8)
    assert max(verified) == max_rows - 1


def test_few_where_rows_cost_time():
    """At 20 ms a step and 4 ms a row, a node needs a value of about 0.2 tokens times the speedup."""
    arms, verified = run(make({**CHEAP, "row": 0.004}), 1, [0.9, 0.6, 0.4, 0.1], 100)
    assert 1 <= np.mean(verified[20:]) <= 2.5


def test_fewer_the_larger_the_batch_and_no_cliff():
    """Rows cost nothing up to 16, as on a memory-bound machine, and much from there on."""
    rows = {1: 0.02, 16: 0.02, 300: 0.02 + 284 * 0.0015}
    shares = []
    for num_reqs in (1, 2, 4, 8, 12, 16, 32):
        cost = StepCost({"verify": rows, "read": {1: 1e-4}}, 300, {"verify": [1.0, 0.0, 0.0, 0.0, 0.0]})
        _, verified = run(make(cost, max_levels=1), num_reqs, [0.8, 0.7, 0.6, 0.5, 0.4, 0.3], 60)
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
    wanted = np.ones(2, dtype=bool)
    keep = budget.select(Draft(draft.tree, values), names(2), np.full(2, 5), wanted, StepRecord(num_reqs=2))
    assert keep.sum(axis=1).tolist() == [2, 0]


def test_most_rows_of_a_step():
    assert max(run(make(CHEAP, max_rows=20), 8, [0.9, 0.9, 0.9], 10)[1]) == 12
    assert run(make(CHEAP, max_rows=8), 8, [0.9], 40)[1] == [0] * 40


def test_it_learns_that_a_drafter_is_overconfident():
    """Confidences of 0.9 that come true in one of ten cases: verification stops."""
    budget = make({**CHEAP, "row": 0.004, "level": 1e-3})
    _, verified = run(budget, 1, [0.9, 0.9, 0.9, 0.9], 600, truth=[0.1] * 4)
    assert max(verified[:20]) >= 2 and np.mean(verified[-200:]) < 1


def test_what_was_not_verified_teaches_too():
    """Little is verified at first: the drafter's confidence is low.  The drafts are right, so later they are."""
    _, verified = run(make({**CHEAP, "row": 0.003}), 1, [0.1, 0.1], 600, truth=[0.9, 0.9])
    assert verified[0] == 0 and np.mean(verified[-100:]) > 1.9


def test_drafting_resumes_when_drafts_are_right_again():
    """Drafting pauses while drafts are wrong; a trial finds that they are right again."""
    budget = make({**CHEAP, "row": 0.001, "read": 0.002, "level": 0.001})
    arms, _ = run(budget, 1, [0.03, 0.01], 400, draft_seconds=0.004)
    paused = [arm is PLAIN for arm in arms]
    assert sum(paused[-200:]) > 150 and not all(paused[-200:])
    arms, verified = run(budget, 1, [0.9, 0.9, 0.8], 600, draft_seconds=0.004)
    assert sum(arm is EAGLE for arm in arms[-200:]) > 190 and np.mean(verified[-200:]) > 2


@pytest.mark.parametrize("num_reqs", [1, 4, 16])
@pytest.mark.parametrize("draft_seconds", [0.002, 0.01, 0.05])
def test_time_that_drafts_may_lose(num_reqs, draft_seconds):
    """Nothing is accepted; each draft takes the time measured at start."""
    losses = []
    budget = make({**CHEAP, "row": 0.002, "read": draft_seconds - OVERHEAD * STEP}, max_levels=1)
    run(budget, num_reqs, [0.01], 3000, draft_seconds=draft_seconds, losses=losses)
    assert 0 < sum(losses) <= FIRST_LOSS + SHARE * 3000
    assert sum(losses[len(losses) // 2 :]) < SHARE * 1500 + 1


def test_the_time_of_drafts_is_charged():
    losses = []
    budget = make({**CHEAP, "row": 0.002, "read": 0.01 - OVERHEAD * STEP}, max_levels=1)
    run(budget, 1, [0.01], 10, draft_seconds=0.01, losses=losses)
    assert sum(losses) > 0.4 and budget.left < FIRST_LOSS - sum(losses) / 2  # first drafts are charged as measured


def test_a_short_draft_is_tried_of_a_drafter_whose_whole_draft_costs_too_much():
    """SWIFT: a chain may take ten plain steps, its first token half of one."""
    swift = Arm("swift", model=True, model_free=False)
    plans = [
        make(StepCost({"verify": {1: STEP}}, 300), (swift,), max_levels=1, shortest_draft=share).plan(1)
        for share in (0.5, 10.0)
    ]
    assert [plan.arm for plan in plans] == [swift, PLAIN]
    assert 2 * STEP < plans[0].seconds < 4 * STEP


def test_a_first_draft_that_is_cheaper_than_expected_counts_at_once():
    """Else a large batch pauses for the trials of a hundred steps: at 32 requests that is a whole answer."""
    worth, one = Worth(np.array([0.6]), cost=0.7), np.ones(1)
    worth.learn(np.array([0.6]), one, 0.3, math.inf, 32)
    assert worth.outlook(0.0)[0].cost == pytest.approx(0.3)
    worth.learn(np.array([0.6]), one, 3.0, math.inf, 32)  # the first ones may take ten times as long
    assert worth.outlook(0.0)[0].cost == pytest.approx(0.3)


def test_a_large_batch_drafts_soon_where_it_pays():
    """The drafter takes a fifth of the time that was measured at start: by that time drafts do not pay."""
    rows = {1: 0.012, 300: 0.012 + 299 * 0.0003}
    cost = StepCost({"verify": rows, "read": {1: 5e-3}, "level": {1: 5e-3}}, 300, {"verify": [1.0, 0, 0, 0, 0]})
    arms, _ = run(make(cost, max_levels=5), 32, [0.65], 100, draft_seconds=1e-3)
    assert sum(arm is EAGLE for arm in arms[20:]) > 60


def test_a_disturbed_draft_is_not_charged_whole():
    budget = make({**CHEAP, "read": 0.001})
    run(budget, 1, [0.01], 1, draft_seconds=10.0)
    assert budget.left > FIRST_LOSS - 1.0


def test_a_union_leaves_a_drafter_out_that_is_not_worth_its_time():
    arms, _ = run(make({**CHEAP, "read": 0.02, "level": 0.02}, (ALONE, BOTH)), 2, [0.7, 0.7], 600, draft_seconds=0.02)
    assert sum(arm is ALONE for arm in arms[-200:]) > 180 and BOTH in arms


def test_a_union_drafts_with_all_for_one_request():
    arms, _ = run(make(CHEAP, (ALONE, BOTH)), 1, [0.7, 0.7], 100)
    assert arms.count(PLAIN) == 2 and ALONE not in arms


def beside(budget, expected, gain, steps, by_model=5e-3):
    """Run steps of one request: other drafters expect so many tokens, the model drafter adds one likely node."""
    ran = []
    for _ in range(steps):
        if budget.plan(1).arm is PLAIN:
            continue
        ran.append(budget.wants_model(expected))
        record = StepRecord(num_reqs=1, drafting=1e-3 + by_model * ran[-1], by_model=by_model * ran[-1])
        only = np.array([[False, True]])
        keep = budget.select(chains(1, [gain]), names(1), np.full(1, 5), np.ones(1, dtype=bool), record, only)
        record.num_accepted = int(keep.sum())
        budget.learn(record, None)
    return np.mean(ran[-100:])


def test_the_model_drafter_runs_where_the_others_expect_little():
    """At 20 ms a step, 10 ms are worth more than half a token; for less it is tried now and then."""
    budget = make(CHEAP, (ALONE, BOTH))
    assert beside(budget, 0.0, 0.9, 50) == 1.0
    assert 0.0 < beside(budget, 5.0, 0.3, 1500, by_model=1e-2) < 0.2
    # What was learned of confident others says nothing of the rest.
    assert beside(budget, 0.0, 0.9, 50) == 1.0
    # In a larger batch, arms are compared; the one that was chosen runs.
    budget.plan(4)
    assert budget.wants_model(5.0)


def test_levels_grow_while_they_are_worth_their_cost():
    budget = make({**CHEAP, "level": 0.002})
    floors = budget.plan(1).floors
    assert len(floors) == 5 and all(0.06 < floor < 1 for floor in floors[:3])
    budget.left = 3 * 0.002 / STEP
    floors = budget.plan(1).floors  # no level follows where no time may be lost
    assert max(floors[:2]) < 1 and floors[3:] == (math.inf, math.inf)


def test_a_paused_drafter_comes_back_for_more_than_it_must_catch_up_with():
    for catch_up, wanted in ((0.0, EAGLE), (20.0, PLAIN)):  # plain steps
        planner = Planner(EAGLE)
        planner.choose(4, {PLAIN: Outlook(0.0, 0.0), EAGLE: Outlook(0.0, 0.5)})
        assert planner.regime.arm is PLAIN
        planner.choose(4, {PLAIN: Outlook(0.0, 0.0), EAGLE: Outlook(0.1, 0.0)}, catch_up)
        assert planner.regime.arm is wanted


def test_a_load_that_ends_leaves_nothing_behind():
    """Drafting is too slow at 32 requests; back at one request everything is drafted from the first step on."""
    rows = {1: 0.02, 16: 0.02, 300: 2.0}
    cost = StepCost({"verify": rows, "read": {1: 1e-4}, "level": {1: 1e-4}}, 300, {"verify": [1.0, 0, 0, 0, 0]})
    budget = make(cost)
    for _ in range(3):
        arms, verified = run(budget, 1, [0.8, 0.8, 0.6], 30)
        assert arms.count(PLAIN) <= 2 and np.mean(verified) > 2
        arms, _ = run(budget, 32, [0.8, 0.8, 0.6], 300, draft_seconds=0.05)
        assert sum(arm is PLAIN for arm in arms) > 270


def test_no_request_decodes():
    assert make(CHEAP).plan(0).arm is PLAIN


def test_forgets_requests():
    budget = make(CHEAP)
    run(budget, 2, [0.5], 10)
    assert set(budget.acceptance._records) == {"r0", "r1"}
    budget.finish(["r0", "unknown"])
    assert set(budget.acceptance._records) == {"r1"}


def test_the_nodes_that_are_kept():
    """Against every number of the best nodes, tried one by one."""
    rng = np.random.default_rng(1)
    counts = set()
    for _ in range(60):
        values = rng.choice([0.9, 0.5, 0.3, 0.0], (int(rng.integers(1, 5)), int(rng.integers(1, 12))))
        costs = np.cumsum(rng.uniform(0, 0.8, int(rng.integers(1, values.size + 2)))) - 0.1
        best = sorted(values[values > 0].tolist(), reverse=True)[: len(costs) - 1]
        profits = [0.0] + [sum(best[:count]) - costs[count] for count in range(1, len(best) + 1)]
        keep, count = best_nodes(values, costs)
        assert profits[count] == pytest.approx(max(profits)) and keep.sum() == count
        assert values[keep].sum() == pytest.approx(sum(best[:count]))
        counts.add(min(count, 2))
    assert counts == {0, 1, 2}
    # Of equal ones the first are kept: a parent stands before its children.
    assert best_nodes(np.full((1, 4), 0.5), np.zeros(3))[0].tolist() == [[True, True, False, False]]


def test_what_the_targets_tokens_say_of_nodes():
    # Two chains from the root (7, 8, 9 and 5, 6), and a request that has gone.
    ids = torch.tensor([[1, 7, 8, 9, 5, 6], [1, 2, 0, 0, 0, 0]])
    parents = torch.tensor([[-1, 0, 1, 2, 0, 4], [-1, 0, -1, -1, -1, -1]])
    tree = from_flat(ids, parents, torch.tensor([6, 2]))
    log_values = torch.tensor([[0.0, -0.5, -1.0, -1.5, -1.0, -1.5], [0.0, -0.5, -9, -9, -9, -9]])
    acceptance = NodeAcceptance(1)
    scored = acceptance.score(Draft(tree, log_values), ["a", "b"], np.array([1, 1]), np.ones(2, dtype=bool), 0)
    # At the start the drafter's values are taken as they are.
    assert scored.values[0] == pytest.approx([0.0, *np.exp(log_values[0, 1:].numpy())], rel=1e-4)
    assert scored.values[1, 1] == pytest.approx(math.exp(-0.5)) and not scored.values[1, 2:].any()
    acceptance.learn(["a"], np.array([[1, 7, 4]], dtype=np.int32), np.array([3]))
    # 7 was right; 8 was not, so that nothing is known of 9; 5 was not, nor is anything known of 6.
    accepted, expected = acceptance._records["a"]
    assert accepted == 1 and expected == pytest.approx(math.exp(-0.5) + math.exp(-0.5) + math.exp(-1.0), rel=1e-3)


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
