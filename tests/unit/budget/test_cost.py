"""Seconds of steps: the measurement, how it follows observed times, and its file."""

from __future__ import annotations

import json

import numpy as np
import pytest

from vllm_specplug.budget import saved
from vllm_specplug.budget.cost import CountTable, RoundCost, StepCost, counts_up_to

ROWS = {1: 0.010, 4: 0.0105, 16: 0.013, 32: 0.017, 64: 0.025}


def test_a_table_reads_between_and_behind_its_counts():
    table = CountTable({1: 0.010, 8: 0.012, 4: 0.009, 16: 0.016})
    assert table.at(1) == table.at(4) == 0.010 and table.at(12) == pytest.approx(0.014)
    assert table.at(32) == pytest.approx(0.024)
    assert counts_up_to(1) == [1] and counts_up_to(20) == [*range(1, 10), 12, 13, 16, 17, 20]


def test_contexts_and_trees_do_not_make_rows_look_expensive():
    """Plain steps of large batches attend to many contexts, and a tree's attention has a cost of its own."""
    rng, cost = np.random.default_rng(0), StepCost({"verify": ROWS}, 64)

    def truth(num_reqs, nodes):
        by_rows = np.interp(num_reqs + nodes, list(ROWS), list(ROWS.values()))
        return by_rows + 0.0006 * (num_reqs - 1) + 0.0001 * nodes + 0.001 * (nodes > 0)

    for _ in range(600):
        num_reqs = int(rng.choice([1, 4, 8]))
        nodes = num_reqs * int(rng.integers(1, 4)) if rng.random() < 0.7 else 0
        cost.observe_step(num_reqs, nodes, truth(num_reqs, nodes) * rng.uniform(0.95, 1.05))
    for num_reqs in (1, 4, 8):
        nodes = num_reqs * np.arange(4)
        found, true = cost.verification(num_reqs)[nodes], truth(num_reqs, nodes)
        assert found == pytest.approx(true, rel=0.05)
        assert found[3] - found[1] == pytest.approx(true[3] - true[1], rel=0.3, abs=3e-4)


def test_it_follows_a_slower_machine_and_no_hiccup():
    cost = StepCost({"verify": ROWS, "level": {1: 0.001}}, 64)
    for _ in range(2000):
        cost.observe_step(1, 0, 0.012)
    cost.observe_step(1, 0, 5.0)
    assert cost.plain(1) == pytest.approx(0.012, rel=0.08)
    for _ in range(200):
        cost.observe_step(1, 0, 0.018)
        cost.observe_part("level", 4, 0.002)
    assert cost.plain(1) == pytest.approx(0.018, rel=0.05) and cost.part("level", 9) == pytest.approx(0.002, rel=0.05)
    assert cost.part("read", 9) == 0.0


def test_costs_are_kept_in_a_file(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    facts = {"machine": "a", "model": "m"}
    assert saved.load(StepCost, facts, 64) is None and saved.saved_costs() == []
    cost = StepCost({"verify": ROWS, "level": {1: 0.001}}, 64)
    cost.observe_step(8, 8, 0.03)
    path = saved.save(facts, cost)
    again = saved.load(StepCost, facts, 64)
    assert saved.load(StepCost, {"machine": "b"}, 64) is None
    assert again.verification(8) == pytest.approx(cost.verification(8)) and again.measured == cost.measured
    assert [known for known, _ in saved.saved_costs()] == [facts]
    outdated = {"facts": facts, "measured": cost.measured, "weights": {"verify": [1.0, 0.1]}}
    without_steps = {"facts": facts, "measured": {"level": {"1": 1}}}
    for wrong in ("{", *map(json.dumps, ({"facts": facts, "seconds": {}}, without_steps, outdated))):
        path.write_text(wrong)
        assert saved.load(StepCost, facts, 64) is None and saved.saved_costs() == []
    assert caplog.text.count("cannot be used, costs are measured again") == 4
    rounds = RoundCost({0: {1: 1.0}, 7: {1: 1.2, 8: 2.0}}, 8)
    assert saved.save(facts, rounds).parent.name == "step_times"
    assert saved.load(RoundCost, facts, 8).at(7, 4) == rounds.at(7, 4)
    path = tmp_path / "vllm-specplug" / "step_times" / path.name
    path.write_text(json.dumps({"facts": facts, "measured": rounds.measured}))  # as earlier versions wrote it
    assert saved.load(RoundCost, facts, 8).at(7, 4) == rounds.at(7, 4)


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "vllm-specplug").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert saved.save({}, StepCost({"verify": ROWS}, 8)) is None and saved.load(StepCost, {}, 8) is None
