"""The default budget on simulated GPUs: the rows of ``benchmarks/results`` that were the slowest, anew."""

import pytest

from benchmarks.gpu.budget_simulation import GPUS, MODELS, SCENARIOS, Setting, simulate


@pytest.mark.parametrize(("num_reqs", "sampled"), [(1, True), (2, True), (4, False), (256, False)])
def test_a_drafter_that_is_worth_nothing_costs_less_than_two_percent(num_reqs, sampled):
    setting = Setting(GPUS["B200"], MODELS["8B"], sampled)
    assert simulate(setting, SCENARIOS["worth nothing"], num_reqs, 1000, 0)["speedup"] >= 0.98
