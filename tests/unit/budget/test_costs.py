"""The cost model: what it reads, how it follows what it observes, and its file."""

from __future__ import annotations

import json

import numpy as np
import pytest

from vllm_specplug.budget import cost_files
from vllm_specplug.budget.costs import PARTS, USUAL, CostModel, CostTable, non_decreasing
from vllm_specplug.budget.timing import fastest, knots_up_to

LIMITS = {"rows": 64, "requests": 8}


def table(**changes):
    return CostTable([1, 8, 16, 32], [0.010, 0.012, 0.016, 0.024], 64, **changes)


def test_reads_between_and_behind_the_knots():
    read = table()
    assert read.at(1) == pytest.approx(0.010) and read.at(12) == pytest.approx(0.014)
    assert read.at(1.5) == pytest.approx((read.at(1) + read.at(2)) / 2)
    assert read.at(64) == pytest.approx(0.024 + 32 * 0.0005)
    assert read.at(0) == 0.0 and read.at(1000) == read.at(64)
    assert (np.diff(read.seconds) >= 0).all()


def test_measured_dips_are_levelled():
    assert CostTable([1, 2, 4], [0.01, 0.008, 0.02], 4).at(2) == pytest.approx(0.009)
    assert non_decreasing(np.array([3.0, 1.0, 2.0, 5.0, 4.0])).tolist() == [2.0, 2.0, 2.0, 4.5, 4.5]


def test_one_table_follows_a_slower_machine_everywhere():
    read = table()
    rng = np.random.default_rng(0)
    for _ in range(60):
        read.observe(9, 2 * 0.0125 * rng.uniform(0.97, 1.03))
    assert read.at(9) == pytest.approx(0.025, rel=0.05)
    # Never seen, but part of the same machine.
    assert read.at(1) == pytest.approx(0.020, rel=0.15) and read.at(32) == pytest.approx(0.048, rel=0.15)


def test_it_learns_a_shape_that_was_not_measured():
    read = table()
    rng = np.random.default_rng(1)
    for _ in range(400):
        rows = int(rng.integers(1, 33))
        read.observe(rows, (0.010 + 0.001 * rows) * rng.uniform(0.9, 1.1))
    for rows in (1, 8, 16, 32):
        assert read.at(rows) == pytest.approx(0.010 + 0.001 * rows, rel=0.12)


def test_a_hiccup_moves_little():
    read = table()
    for _ in range(50):
        read.observe(8, 0.012)
    read.observe(8, 5.0)
    assert read.at(8) < 0.013
    read.observe(0, 1.0)
    read.observe(8, 0.0)
    assert read.observations == 51


def test_it_follows_a_change_after_a_long_time():
    read = table()
    for _ in range(2000):
        read.observe(8, 0.012)
    for _ in range(60):
        read.observe(8, 0.018)
    assert read.at(8) == pytest.approx(0.018, rel=0.05)


@pytest.mark.parametrize("knots", [[2, 3], [1, 1], [1, 2, 3]])
def test_odd_knots(knots):
    with pytest.raises(ValueError, match="increasing counts"):
        CostTable(knots, [0.1, 0.2], 8)


def test_parts_that_were_not_measured_are_learned_at_once():
    model = CostModel({"verify": {1: 0.01, 32: 0.02}}, LIMITS)
    assert set(model.tables) == set(PARTS) and model["verify"].at(32) == pytest.approx(0.02)
    for _ in range(10):
        model["model_free"].observe(2, 0.004)
    assert model["model_free"].at(2) == pytest.approx(0.004, rel=0.1)


def test_a_slow_first_time_does_not_count():
    model = CostModel({}, LIMITS)
    for seconds in (0.050, 0.004, 0.005, 0.004):
        model["draft_overhead"].observe(2, seconds)
    assert model["draft_overhead"].at(2) == pytest.approx(0.004, rel=0.01)
    for _ in range(20):
        model["draft_overhead"].observe(2, 0.006)
    assert model["draft_overhead"].at(2) == pytest.approx(0.006, rel=0.05)


def test_guesses_are_not_saved_as_measurements():
    model = CostModel({"verify": {1: 0.01, 32: 0.02}}, LIMITS)
    for _ in range(CostTable.FIRST_TIMES):
        model.observe("draft_overhead", 2, 0.004, 1)
    again = CostModel(CostModel.measured_in(model.to_json()), LIMITS)
    assert set(model.to_json()) == {"verify", "draft_overhead"}
    again.observe("between_steps", 2, 0.005, 1)
    assert again["between_steps"].at(2) == pytest.approx(0.005, rel=0.05)


def test_save_and_load(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    facts = {"machine": "a", "model": "m"}
    assert cost_files.load(facts) is None and cost_files.saved_models() == []
    model = CostModel({"verify": {1: 0.01, 32: 0.02}}, LIMITS)
    path = cost_files.save(facts, model, worth={"eagle2": [[0.0]]})
    saved = cost_files.load(facts)
    assert saved["worth"] == {"eagle2": [[0.0]]} and cost_files.load({"machine": "b"}) is None
    again = CostModel(CostModel.measured_in(saved["seconds"]), LIMITS)
    assert again["verify"].at(20) == pytest.approx(model["verify"].at(20))
    assert [entry["facts"] for entry in cost_files.saved_models()] == [facts]
    path.write_text('{"seconds": {"verify": {"counts": [3], "seconds": [1]}}}')
    assert cost_files.load(facts) is None
    wrong = {"verify": {"counts": [1], "seconds": [0.01], "per_term": {"nodes": "many"}}}
    path.write_text(json.dumps({"facts": facts, "seconds": wrong}))
    assert cost_files.load(facts) is None
    # A file of an older version, whose parts had other names, is measured anew.
    older = {"verify": {"counts": [1], "seconds": [0.01]}, "host": {"counts": [1], "seconds": [0.001]}}
    path.write_text(json.dumps({"facts": facts, "seconds": older}))
    assert cost_files.load(facts) is None and "unknown parts of a step: host" in caplog.text
    assert cost_files.saved_models() == []
    path.write_text("{")
    assert cost_files.load(facts) is None and cost_files.saved_models() == []


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "vllm-specplug").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cost_files.save({}, CostModel({}, LIMITS)) is None and cost_files.load({}) is None


def test_knots_and_the_fastest_call():
    assert knots_up_to(1) == [1] and knots_up_to(20) == [*range(1, 10), 12, 13, 16, 17, 20]
    ran, now = [], [0.0]

    def run(count):
        ran.append(count)
        now[0] += 0.5 if ran == [1, 2, 1, 2] else 1.0 + count

    assert fastest(run, [1, 2], lambda: now[0], 3, 100.0) == {1: 2.0, 2: 0.5}
    ran.clear()
    assert fastest(run, [1, 2, 4], lambda: now[0], 3, 4.0) == {1: 2.0, 2: 3.0}
    assert json.dumps(CostModel({}, LIMITS).to_json())


def test_parts_that_do_not_run_follow_the_targets_steps():
    """The machine gets slower while nothing is drafted; the estimated cost of drafting grows too."""
    model = CostModel({"verify": {1: 0.01, 64: 0.05}, "first_pass": {1: 0.001, 64: 0.002}, "tree": {1: 0.001}}, LIMITS)
    for step in range(0, 160, 16):
        for part, seconds in (("verify", 0.01), ("first_pass", 0.001), ("tree", 0.001)):
            model.observe(part, 1, seconds, step)
    for step in range(160, 800, 16):
        model.observe("verify", 1, 0.02, step)
        model.observe("tree", 1, 0.001, step)
    slower = model["verify"].at(1) / 0.01
    assert 1.7 < slower < 2.1
    assert model["first_pass"].at(1) == pytest.approx(0.001 * slower, rel=0.1)
    assert model["tree"].at(1) == pytest.approx(0.001, rel=0.1)  # that was seen all the time


def test_after_a_pause_an_observation_counts_more():
    def moved(pause):
        model = CostModel({"first_pass": {1: 0.001, 64: 0.002}}, LIMITS)
        for step in range(0, 1600, 16):
            model.observe("first_pass", 1, 0.001, step)
        model.observe("first_pass", 1, 0.0012, 1600 + pause)
        return model["first_pass"].at(1)

    assert moved(5000) > moved(1000) > moved(0)


def test_means_of_many_times_tell_more_than_one_in_many():
    """Rows were measured as more expensive than they are in steps, which also have a fixed part."""
    by_rows = {1: 0.013, 8: 0.0145, 16: 0.018, 32: 0.026}
    errors = np.zeros(2)
    for seed in range(10):
        rng = np.random.default_rng(seed)
        together, one_in_many = CostModel({"verify": by_rows}, LIMITS), CostModel({"verify": by_rows}, LIMITS)
        for step in range(300):
            nodes = int(rng.integers(8, 20)) if step % 2 else 0
            seconds = (0.0177 + 0.00015 * nodes) * rng.uniform(0.8, 1.2) + 0.1 * (rng.random() < 0.02)
            terms = {"requests": 7, "nodes": nodes, "trees": nodes > 0}
            together.gather("verify", 8 + nodes, seconds, step, nodes > 0, **terms)
            if step % (2 * USUAL) < 2:
                one_in_many.observe("verify", 8 + nodes, seconds, step, **terms)
        assert abs(together["verify"].observations - one_in_many["verify"].observations) <= 2
        for number, model in enumerate((together, one_in_many)):
            seconds = model.verification(8)
            errors[number] += abs(seconds[0] - 0.0177) + abs(seconds[14] - 0.0198)
    assert errors[0] < 0.6 * errors[1]


def test_what_is_seldom_seen_is_learned_from_at_once():
    """And times of long ago are not averaged with new ones."""
    model = CostModel({"verify": {1: 0.01, 32: 0.02}}, LIMITS)
    for step in range(USUAL - 1):
        model.gather("verify", 1, 0.05, step, None)
    assert model["verify"].observations == 0
    for step in range(USUAL + 1):
        model.gather("verify", 1, 0.01, 1000 + step, None)
        assert model["verify"].observations == (1 if step < USUAL else 2)
    assert model["verify"].at(1) == pytest.approx(0.01, rel=1e-3)


def test_few_and_many_rows_are_not_averaged():
    """A drafter reads a prompt now and then: that is no disturbance, and does not make single rows look expensive."""
    model = CostModel({"first_pass": {1: 0.001, 8: 0.001, 64: 0.008}}, LIMITS)
    for step in range(200 * USUAL):
        many = step % 8 == 0
        model.gather("first_pass", 64 if many else 4, 0.012 if many else 0.001, step, None)
    assert model["first_pass"].at(4) == pytest.approx(0.001, rel=0.03)
    assert model["first_pass"].at(64) == pytest.approx(0.012, rel=0.1)


def test_contexts_and_trees_do_not_make_rows_look_expensive():
    """Plain steps of large batches attend to many contexts, and a tree's attention has a cost of its own."""
    rng = np.random.default_rng(0)
    model = CostModel({"verify": {1: 0.010, 4: 0.0105, 16: 0.013, 32: 0.017, 64: 0.025}}, LIMITS)

    def truth(num_reqs, nodes):
        by_rows = np.interp(num_reqs + nodes, [1, 4, 16, 32, 64], [0.010, 0.0105, 0.013, 0.017, 0.025])
        return by_rows + 0.0006 * (num_reqs - 1) + 0.0001 * nodes + 0.001 * (nodes > 0)

    for step in range(600):
        num_reqs = int(rng.choice([1, 4, 8]))
        nodes = num_reqs * int(rng.integers(1, 4)) if rng.random() < 0.7 else 0
        terms = {"requests": num_reqs - 1, "nodes": nodes, "trees": nodes > 0}
        seconds = truth(num_reqs, nodes) * rng.uniform(0.95, 1.05)
        model.observe("verify", num_reqs + nodes, seconds, step, **terms)
    for num_reqs in (1, 4, 8):
        nodes = num_reqs * np.arange(4)
        found, true = model.verification(num_reqs)[nodes], truth(num_reqs, nodes)
        assert found == pytest.approx(true, rel=0.05)
        # Without terms this fails: what large batches and trees cost is then taken for the cost of rows.
        assert found[3] - found[1] == pytest.approx(true[3] - true[1], rel=0.3, abs=3e-4)
    again = CostModel(CostModel.measured_in(model.to_json()), LIMITS, CostModel.terms_in(model.to_json()))
    assert again.verification(8) == pytest.approx(model.verification(8))
    assert again.verification(8)[9] > again["verify"].at(17)
