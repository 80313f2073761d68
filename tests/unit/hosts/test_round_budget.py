"""The budget in the scheduler of the V2 runner: its decisions, and the outcomes that it is given."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_specplug.budget.choose import ShapeBudget
from vllm_specplug.budget.cost import RoundCost
from vllm_specplug.budget.shapes import shapes_of
from vllm_specplug.config import parse_options
from vllm_specplug.gpu import budget
from vllm_specplug.gpu.budget import BudgetedRounds, RoundBudget

SHAPES = shapes_of(15, 4, 3)


SECONDS = {0: 1.0, 1: 1.1, 3: 1.15, 7: 1.2, 15: 1.4}


def times():
    return RoundCost({nodes: {1: seconds, 8: seconds} for nodes, seconds in SECONDS.items()}, 8)


@pytest.fixture
def config():
    options = parse_options({"method": "lookup", "num_speculative_tokens": 15, "budget": "measured"})
    return SimpleNamespace(
        speculative_config=SimpleNamespace(specplug=options),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=256),
        model_config=SimpleNamespace(model="model", dtype="bfloat16", quantization=None, enforce_eager=False),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        lora_config=None,
    )


@pytest.fixture
def rounds(config, monkeypatch):
    monkeypatch.setattr(budget.saved, "load", lambda *_: times())
    found = RoundBudget(config)
    assert found.budget.plan(1) > 0
    return found


class Heard(list):
    """What a budget was told."""

    def __init__(self, budget, monkeypatch):
        super().__init__()
        monkeypatch.setattr(budget, "learn", lambda *args: self.append(("learn", *args)))
        monkeypatch.setattr(budget.cost, "observe", lambda *args: self.append(("took", *args)))


def step(rows, drafts, new=()):
    return SimpleNamespace(
        num_scheduled_tokens=rows,
        scheduled_spec_decode_tokens={name: [-1] * count for name, count in drafts.items()},
        scheduled_new_reqs=list(new),
    )


def test_outcomes_of_a_step_that_only_decodes(rounds, monkeypatch):
    heard = Heard(rounds.budget, monkeypatch)
    monkeypatch.setattr(budget.time, "perf_counter", iter([10.0, 10.5, 12.0]).__next__)
    uniform = step({"a": 8, "b": 8}, {"a": 7, "b": 7})
    rounds.learn(9.0, uniform, {"a": 3, "b": 1})  # no output before it: no time
    assert heard == [("learn", 7, 2, 2)]
    heard.clear()
    rounds.learn(9.9, uniform, {"a": 1, "b": 1})
    assert heard == [("learn", 7, 0, 2), ("took", 7, 2, 0.5)]
    heard.clear()
    rounds.learn(11.75, step({"a": 1}, {}), {"a": 1})  # scheduled late: the engine had nothing to do before
    assert heard == [("took", 0, 1, 0.25)]


def test_mixed_steps_tell_acceptance_by_shape_and_no_time(rounds, monkeypatch):
    heard = Heard(rounds.budget, monkeypatch)
    rounds.learn(0.0, step({"a": 1}, {}), {"a": 1})
    heard.clear()
    mixed = step({"a": 8, "b": 16, "c": 30, "d": 1}, {"a": 7, "b": 15})
    rounds.learn(0.0, mixed, {"a": 2, "b": 5, "c": 0, "d": 1})
    assert heard == [("learn", 7, 1, 1), ("learn", 15, 4, 1)]
    heard.clear()
    rounds.learn(0.0, step({"a": 8}, {"a": 7}, new=["a"]), {"a": 0})  # preempted, or still reading its prompt
    assert heard == []


def test_without_step_times_nothing_is_drafted(config, monkeypatch, caplog):
    monkeypatch.setattr(budget.saved, "load", lambda *_: None)
    rounds = RoundBudget(config)
    assert [rounds.plan(count) for count in (1, 8)] == [0, 0] and rounds.chosen == {0: 2}
    assert "step times" in caplog.text and "budget='fixed'" in caplog.text
    rounds.learn(0.0, step({"a": 1}, {}), {"a": 1})


class Scheduler:
    """What the mixin needs of vLLM's."""

    def __init__(self, config):
        self.vllm_config, self.requests, self.seen = config, {}, []

    def _update_after_schedule(self, scheduler_output):
        self.seen.append(scheduler_output.num_spec_tokens_to_schedule)

    def update_from_output(self, scheduler_output, model_runner_output):
        return "outputs"


class Budgeted(BudgetedRounds, Scheduler):
    pass


def test_the_scheduler_asks_for_requests_that_decode_next(config, monkeypatch):
    monkeypatch.setattr(budget.saved, "load", lambda *_: times())
    scheduler, asked = Budgeted(config), []
    scheduler.requests = {
        "decodes": SimpleNamespace(num_computed_tokens=9, num_tokens=10),
        "last of prompt": SimpleNamespace(num_computed_tokens=4, num_tokens=9),
        "more to read": SimpleNamespace(num_computed_tokens=0, num_tokens=99),
    }
    monkeypatch.setattr(scheduler.round_budget, "plan", lambda count: (asked.append(count), 7)[1])
    output = step({"decodes": 1, "last of prompt": 5, "more to read": 20}, {})
    output.num_spec_tokens_to_schedule = 15
    scheduler._update_after_schedule(output)
    assert asked == [2] and scheduler.seen == [7]
    learned = []
    monkeypatch.setattr(scheduler.round_budget, "learn", lambda *args: learned.append(args[1:]))
    result = SimpleNamespace(req_id_to_index={"decodes": 0, "more to read": 1}, sampled_token_ids=[[5, 6], []])
    assert scheduler.update_from_output(output, result) == "outputs"
    assert learned == [(output, {"decodes": 2, "more to read": 0})]


def test_a_fixed_budget_leaves_the_scheduler_alone(config):
    config.speculative_config.specplug = parse_options({"method": "lookup", "budget": "fixed"})
    scheduler = Budgeted(config)
    output = step({}, {})
    output.num_spec_tokens_to_schedule = 15
    scheduler._update_after_schedule(output)
    assert scheduler.round_budget is None and scheduler.seen == [15]


def test_the_budget_adapts_to_outcomes_given_by_the_scheduler(rounds, monkeypatch):
    """Drafts that nobody accepts: one step late, the rounds become plain."""
    assert isinstance(rounds.budget, ShapeBudget)
    monkeypatch.setattr(rounds.budget.cost, "observe", lambda *_: None)
    late, chosen = [], []
    for _ in range(40):
        nodes = rounds.plan(2)
        chosen.append(nodes)
        late.append(step({"a": nodes + 1, "b": nodes + 1}, {"a": nodes, "b": nodes} if nodes else {}))
        if len(late) > 1:
            rounds.learn(0.0, late.pop(0), {"a": 1, "b": 1})
    assert chosen[0] > 0 and chosen[-10:].count(0) >= 9
