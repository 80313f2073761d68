"""SWIFT without vLLM: options, layer sets, siblings by confidence, the search, the ledger, the saved state."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from vllm_specplug.config import ConfigError, parse_options
from vllm_specplug.proposers.swift.drafting import DraftedLevel, chain_with_siblings
from vllm_specplug.proposers.swift.layer_set import LayerSet, num_choices
from vllm_specplug.proposers.swift.ledger import MAX_CREDIT, Ledger
from vllm_specplug.proposers.swift.options import check_target
from vllm_specplug.proposers.swift.search import LayerSearch, SearchOptions, predict_scores
from vllm_specplug.proposers.swift.state import SwiftState, load_state
from vllm_specplug.types import PADDING

# ---- options


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"skip_ratio": 0}, "skip_ratio=0.* is out of range: choose 0.01 to 0.8"),
        ({"skip_ratio": -0.1}, "out of range"),
        ({"skip_ratio": 0.81}, "0.8"),
        ({"skip_ratio": "half"}, "must be a number"),
        ({"min_confidence": 1.5}, "out of range"),
        ({"context_window": 2}, "'context_window' was removed: candidates are scored on 32 tokens. Leave it out"),
        ({"streams": True, "adapt": False}, "'adapt' was removed: .*'streams' was removed: .*Leave them out"),
        ({"swift_state": "no/such/folder/state.json"}, "create its folder"),
        ({"skip": 0.5}, "unknown key 'skip'"),
        ({"model": "x"}, "unknown key 'model'"),
    ],
)
def test_bad_options(given, message):
    with pytest.raises(ConfigError, match=message):
        parse_options({"method": "swift", **given})


def test_targets_without_sub_layers_to_skip():
    options = parse_options({"method": "swift", "skip_ratio": 0.2})
    for layers in (1, 2):
        with pytest.raises(ConfigError, match="the first and the last always run: swift cannot skip one"):
            check_target(options, layers)
    with pytest.raises(ConfigError, match="raise skip_ratio"):
        check_target(options, 3)
    check_target(parse_options({"method": "swift"}), 3)
    check_target(options, 8)


# ---- layer sets


@pytest.mark.parametrize("num_layers", [4, 7, 30])
@pytest.mark.parametrize("ratio", [0.25, 0.45, 0.5, 0.8])
def test_uniform(num_layers, ratio):
    found = LayerSet.uniform(num_layers, ratio)
    assert found.num_skipped == num_choices(num_layers, ratio) == found.vector().sum()
    assert LayerSet.from_vector(found.vector()) == found
    gaps = np.diff(found.attention)
    assert gaps.size == 0 or gaps.max() - gaps.min() <= 1


@pytest.mark.parametrize("layers", [(0,), (5,), (2, 1), (1, 1), (-1,)])
def test_first_and_last_layer_always_run(layers):
    with pytest.raises(ValueError, match="always run"):
        LayerSet(6, layers)
    with pytest.raises(ValueError, match="always run"):
        LayerSet(6, (), layers)


# ---- drafting


def level(requests, *tops):
    probs = torch.zeros(len(requests), 10)
    for row, top in enumerate(tops):
        probs[row] = torch.tensor([top, *((1 - top) * 0.5**i / 2 for i in range(9))])
    ids = torch.arange(10).repeat(len(requests), 1) + 10 * torch.tensor(requests).unsqueeze(1)
    return DraftedLevel(torch.tensor(requests), ids, probs)


def test_tree_by_confidence():
    """Request 0 is certain, then less so; request 1 stops after one level; request 2 drafts nothing."""
    draft = chain_with_siblings(torch.tensor([7, 8, 9]), [level([0, 1], 0.97, 0.9), level([0], 0.6)], 20)
    tree = draft.tree
    assert tree.num_rows.tolist() == [1 + 1 + 5, 1 + 3, 1]
    assert tree.token_ids[0, :7].tolist() == [7, 0, 0, 1, 2, 3, 4]
    assert tree.parents[0, :7].tolist() == [PADDING, 0, 1, 1, 1, 1, 1]
    assert tree.depths[1, :4].tolist() == [0, 1, 1, 1]
    assert draft.log_values[0, 2].exp().item() == pytest.approx(0.97 * 0.6)
    assert tree.token_ids[2, 0] == 9


# ---- the search


class Planted:
    """Windows on which some sub-layers may be skipped at no loss: skipping others lowers the matchness."""

    def __init__(self, num_layers=12, noise=0.0, seed=0):
        draw = np.random.default_rng(seed)
        count = 2 * (num_layers - 2)
        self.free = np.zeros(count, dtype=bool)
        self.free[draw.choice(count, count // 2, replace=False)] = True
        self.cost = np.where(self.free, 0.0, draw.uniform(0.03, 0.08, count))
        self.noise, self.draw = noise, draw
        self.ease = 0.0

    def __call__(self, layer_set, window):
        difficulty = self.noise * np.random.default_rng(window).normal()
        own = 0.3 * self.noise * self.draw.normal()
        score = 1 - (layer_set.vector() * self.cost).sum() + difficulty + own + self.ease
        return float(np.clip(score, 0, 1))


def run(search, problem, steps, uses=8, first=0):
    """Score sets, some on each window, until ``steps`` candidates or the end of the search."""
    window = first
    while search.all_steps < steps and not search.stopped:
        for _ in range(uses):
            layer_set = search.next_set(window)
            search.add(layer_set, problem(layer_set, window))
            if search.stopped:
                break
        window += 1
    return window


def test_planted_layers_are_found():
    problem = Planted()
    search = LayerSearch(SearchOptions(12, 0.5, max_steps=2000, patience=2000))
    before = problem(search.best, 0)
    run(search, problem, 2000)
    assert "matchness above" in search.stopped and before < 0.8
    assert (search.best.vector().astype(bool) & ~problem.free).sum() <= 1


def test_one_lucky_window_is_not_enough():
    search = LayerSearch(SearchOptions(12, 0.5))
    start = search.best
    lucky = None
    for window in range(12):
        assert search.next_set(window) == start
        search.add(start, 0.5)
        candidate = search.next_set(window)
        if lucky is None:
            lucky = candidate
            search.add(candidate, 0.9)
        else:
            search.add(candidate, 0.1)
    assert search.best == start


def test_each_window_scores_the_set_in_use_first_then_the_contender():
    search = LayerSearch(SearchOptions(12, 0.5))
    search.add(search.next_set("a"), 0.5)
    candidate = search.next_set("a")
    search.add(candidate, 0.8)
    assert search.next_set("a") != candidate  # the same window gives the same score
    for window in "bc":
        assert search.next_set(window) == search.best != candidate
        search.add(search.best, 0.5)
        assert search.next_set(window) == candidate
        changed = search.add(candidate, 0.7)
    assert changed and search.best == candidate


@pytest.mark.parametrize(
    ("changes", "score", "reason"),
    [
        ({"max_steps": 20, "patience": 500}, 0.5, "20 steps"),
        ({"patience": 15}, 0.5, "15 steps without gain"),
        ({}, 0.97, "matchness above"),
    ],
)
def test_stops(changes, score, reason):
    search = LayerSearch(SearchOptions(12, 0.5, **changes))
    run(search, lambda *_: score, 1000)
    assert reason in search.stopped
    # After the end, only the set in use is scored, once on each window.
    assert search.next_set("new") == search.best
    search.add(search.best, score)
    assert search.next_set("new") is None


@pytest.mark.parametrize("adapt", [True, False])
def test_drift(adapt):
    """The traffic changes: other layers become important."""
    search = LayerSearch(SearchOptions(12, 0.5, patience=400, max_steps=4000, adapt=adapt))
    first = Planted(seed=1)
    start = run(search, first, 4000)
    assert search.stopped
    found, second = search.best, Planted(seed=2)
    for window in range(start, start + 30):
        layer_set = search.next_set(window)
        search.add(layer_set, second(layer_set, window))
        if not search.stopped:
            break
    run(search, second, 8000, first=window + 1)
    assert (search.restarts == 1) is adapt
    assert (second(search.best, 0) > second(found, 0) + 0.1) is adapt


def test_gaussian_process_waits_if_there_is_no_time():
    search = LayerSearch(SearchOptions(12, 0.5, bayes_every=5))
    problem = Planted()
    for window in range(4):
        for _ in range(4):
            layer_set = search.next_set(window, bayesian=False)
            search.add(layer_set, problem(layer_set, window))
    assert search.wants_bayesian and search.next_set(3) is not None and not search.wants_bayesian


def test_gaussian_process_of_two_sets():
    """With numbers worked out by hand: in four sub-layers the two sets differ in all of them."""
    known, scores = np.array([[1.0, 1, 0, 0], [0, 0, 1, 1]]), np.array([0.6, 0.2])
    between, self_noise = math.exp(-4 / 8), 1.5
    mean, deviation = predict_scores(known, scores, np.array([0.5, 0.5]), known)
    # Level 0.4, spread 0.2; the inverse of [[1.5, b], [b, 1.5]] in closed form.
    expected = 0.2 * (1 - between) * (self_noise + between) / (self_noise**2 - between**2)
    assert mean == pytest.approx([0.4 + expected, 0.4 - expected])
    variance = 1 - (self_noise - 2 * between**2 + self_noise * between**2) / (self_noise**2 - between**2)
    assert deviation == pytest.approx([0.2 * math.sqrt(variance)] * 2)


# ---- the ledger


def test_ledger_keeps_both_shares():
    ledger, draw = Ledger(0.02, 0.1), np.random.default_rng(0)
    trials = 0
    for step in range(5000):
        requests = [f"r{step // 40}", f"s{step // 60}"]
        ledger.serve(requests, 0.02)
        cost = float(draw.uniform(0.01, 0.03))
        if ledger.allows(requests, cost):
            ledger.charge(requests, cost)
            trials += 1
            for request in requests:
                assert ledger._delayed[request] <= 0.1 * ledger._served[request] + 1e-9
    assert trials > 50 and ledger.spent <= 0.02 * ledger.served + 1e-9


def test_ledger_never_delays_a_new_request():
    ledger = Ledger(1.0, 0.1)
    ledger.serve(["old"], 100.0)
    assert ledger.allows(["old"], MAX_CREDIT) and not ledger.allows(["old", "new"], 0.001)
    ledger.charge(["old"], 10.0)
    ledger.finish(["old"])
    assert not ledger.allows([], 0.001)  # the credit is spent


# ---- the state


def test_a_loaded_state_continues(tmp_path):
    options, problem = SearchOptions(12, 0.5), Planted(noise=0.03)
    state = SwiftState(options)
    run(state.search, problem, 90)
    state.acceptance.accepted = 5
    state.seconds["draft"] = 1.5
    path = str(tmp_path / "state.json")
    state.save(path)
    again = load_state(path, options)
    assert again.search.to_json() == state.search.to_json()
    assert again.acceptance == state.acceptance and again.seconds == state.seconds
    run(again.search, problem, 200)
    assert again.search.all_steps == 200 or again.search.stopped


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: c.update(num_layers=13), "num_layers=13"),
        (lambda c: c.update(skip_ratio=0.3), "skip_ratio=0.3"),
        (lambda c: c.update(swift_state=99), "this version"),
        (lambda c: c["streams"][""].pop("best"), "damaged"),
        (lambda c: c["streams"][""].update(best=[[0], []]), "damaged"),
        (lambda c: c.update(streams=[]), "damaged"),
    ],
)
def test_states_of_other_targets_or_damaged(tmp_path, damage, message):
    path, options = tmp_path / "state.json", SearchOptions(12, 0.5)
    state = SwiftState(options)
    state.save(str(path))
    content = json.loads(path.read_text())
    damage(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        load_state(str(path), options)


def test_state_that_is_no_json(tmp_path):
    path = tmp_path / "state.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        check_target(parse_options({"method": "swift", "swift_state": str(path)}), 12)
