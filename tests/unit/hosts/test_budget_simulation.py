"""The default budget on simulated GPUs: the rows of ``benchmarks/results`` that were the slowest, anew."""

import pytest

from benchmarks.gpu.budget_simulation import GPUS, MAX_ROWS, MODELS, NODES, SCENARIOS, Setting, simulate


@pytest.mark.parametrize(("num_reqs", "sampled"), [(1, True), (2, True), (4, False), (256, False)])
def test_a_drafter_that_is_worth_nothing_costs_less_than_two_percent(num_reqs, sampled):
    setting = Setting(GPUS["B200"], MODELS["8B"], sampled)
    assert simulate(setting, SCENARIOS["worth nothing"], num_reqs, 1000, 0)["speedup"] >= 0.98


def test_large_batches_gain_by_small_trees():
    """With shapes of 7 nodes and more, 64 requests would draft nothing."""
    assert (NODES, MAX_ROWS) == (63, 2048)
    found = simulate(Setting(GPUS["H200"], MODELS["8B"]), SCENARIOS["EAGLE-2"], 64, 300, 0)
    assert found["usual_nodes"] in (1, 3) and found["speedup"] > 1.4
