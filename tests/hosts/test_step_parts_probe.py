"""The parts of a step, measured in the real engine on a tiny model."""

import os
import random
from types import SimpleNamespace

import pytest
import torch

from tests.doubles import tiny
from tests.hosts.conftest import ENGINE
from vllm_specplug.vllm.probes import in_process, step_parts_probe
from vllm_specplug.vllm.probes.in_process import use_served_threads


@pytest.fixture
def probed(engine):
    llm = engine("eagle")
    engine = llm.llm_engine
    runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    named = {
        runner: ["_model_forward", "propose_draft_token_ids", "execute_model"],
        runner.model: ["compute_logits"],
        runner.drafter.model: ["forward"],
        runner.drafter.operator: ["first", "forward"],
        runner.drafter: ["_score"],
        engine: ["step"],
    }
    clock = step_parts_probe.PartsClock(llm)
    yield llm, clock
    for owner, names in named.items():
        for name in names:
            delattr(owner, name)  # restores the class's methods: other tests use this engine


def test_an_engine_to_be_measured_in_one_process(engine, checkpoints, monkeypatch):
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    seen = []
    monkeypatch.setattr(in_process, "use_served_threads", seen.append)
    llm = in_process.start_in_process({"model": str(checkpoints["target"]), **ENGINE})
    engine.kept.append(llm)
    core = llm.llm_engine.engine_core.engine_core  # it has no process of its own
    assert type(core.model_executor).__name__ == "UniProcExecutor"
    assert len(seen) == 1 and seen[0] is llm.llm_engine.vllm_config


@pytest.mark.parametrize("cpu_lists, threads", [([[5]], 1), ([[0, 1]], 2), ([], 3), (None, None)])
def test_threads_of_a_server(engine, monkeypatch, cpu_lists, threads):
    """The threads of vLLM's workers in a server (None: the real number), not those of an engine in one process."""
    from vllm.utils import ompmultiprocessing

    config, before = engine().llm_engine.vllm_config, torch.get_num_threads()
    monkeypatch.setenv("LD_PRELOAD", "/a/libiomp5.so:/a/libgomp.so")  # vLLM's list refuses both at once
    if cpu_lists is None:
        with monkeypatch.context() as patch:
            patch.delenv("LD_PRELOAD")
            threads = len(ompmultiprocessing.OMPProcessManager(config).cpu_lists[0])
    else:
        manager = SimpleNamespace(cpu_lists=cpu_lists)
        monkeypatch.setattr(ompmultiprocessing, "OMPProcessManager", lambda given: manager if given is config else None)
    torch._C.set_num_threads(3)
    try:
        assert use_served_threads(config) == torch.get_num_threads() == threads
        assert "libgomp" in os.environ["LD_PRELOAD"]
    finally:
        torch._C.set_num_threads(before)


def prompts(count):
    rng = random.Random(3)
    return [{"prompt_token_ids": [rng.randrange(3, tiny.VOCAB) for _ in range(12)]} for _ in range(count)]


def test_parts(probed):
    llm, clock = probed
    step_parts_probe.decode(llm, prompts(2), 12, ignore_eos=True)
    found = clock.mean_parts()
    parts = ("verify_ms", "draft_forward_ms", "draft_other_ms", "host_ms")
    assert found["rounds"] >= 2 and min(found[part] for part in parts) > 0
    assert sum(found[part] for part in parts) == pytest.approx(found["round_ms"], abs=0.01)


def test_the_decisions_own_time(engine):
    tree = {"method": "eagle2", "num_speculative_tokens": 4, "draft_depth": 2, "draft_top_k": 2, "budget": "measured"}
    llm = engine("eagle", tree=tree)  # of this test only
    clock = step_parts_probe.PartsClock(llm)
    step_parts_probe.decode_together(llm, prompts(3), 12)
    found = clock.mean_parts()
    assert 0 < found["decide_ms"] < found["round_ms"]
    assert 2 <= found["rounds"] <= 12  # all three in each
