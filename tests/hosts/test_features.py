"""The table of host features: each refused one is refused by name, each working one has its test."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest
from vllm import SamplingParams
from vllm.config import ModelConfig
from vllm.engine.arg_utils import EngineArgs

from tests.hosts.conftest import ENGINE, TREE, answers_of, make_prompts, token_ids, unlucky_drafter
from tests.vllm_features import WORKS, feature_table
from vllm_specplug.vllm.features import REFUSED

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda refusal: refusal.feature)
def test_refused_at_start(checkpoints, monkeypatch, refusal):
    settings = {"model": str(checkpoints["target"]), **ENGINE, **refusal.example}
    # The host's own reading of targets that we have no checkpoint of; only ours is asked.
    pretended = {key.removeprefix("model."): value for key, value in settings.items() if key.startswith("model.")}
    settings = {key: value for key, value in settings.items() if not key.startswith("model.")}
    honest = EngineArgs.create_model_config

    def create_model_config(self, *args, **kwargs):
        config = honest(self, *args, **kwargs)
        attributes = {name: property(lambda _, value=value: value) for name, value in pretended.items()}
        config.__class__ = type("Pretended", (ModelConfig,), attributes)
        return config

    if pretended:
        monkeypatch.setattr(EngineArgs, "create_model_config", create_model_config)
    speculative = {**TREE, "model": str(checkpoints["eagle"])}
    with pytest.raises(ValueError, match=rf"does not support {refusal.feature} \(found .+\): .*{refusal.fix}"):
        EngineArgs(speculative_config=speculative, **settings).create_engine_config()


@pytest.mark.parametrize("support", WORKS, ids=lambda support: support.feature)
def test_what_works_has_its_test(support):
    for test in filter(None, (support.test, support.v2)):
        file, _, name = test.partition("::")
        body = ast.parse((ROOT / file).read_text()).body
        assert name in [node.name for node in body if isinstance(node, ast.FunctionDef)]


def test_the_page_has_the_table():
    page = (ROOT / "docs" / "support.md").read_text()
    written = page.split("<!-- features -->\n")[1].split("\n<!-- /features -->")[0]
    assert written == feature_table(), "run: python -m tests.vllm_features"


def test_priority_scheduling(engine):
    """Requests of lower priority are preempted for those that come later; the answers stay."""
    prompts = make_prompts(16)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    priorities = [-i for i in range(16)]
    expected = answers_of(engine(block_size=32), prompts, params)
    options = {"block_size": 32, "num_gpu_blocks_override": 14, "enable_prefix_caching": False}
    llm = engine("eagle", scheduling_policy="priority", **options)
    assert token_ids(llm.generate(prompts, params, use_tqdm=False, priority=priorities)) == expected


def test_aborts_leak_nothing(engine):
    """A third of the requests is aborted at some step; the others answer as ever, and no block or request stays."""
    prompts = make_prompts(24)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = answers_of(engine(), prompts, params)
    llm = engine("eagle").llm_engine
    rng, aborted, finished = random.Random(0), {f"abort-{i}" for i in range(0, 24, 3)}, {}
    for i, prompt in enumerate(prompts):
        llm.add_request(f"abort-{i}", prompt, params)
    waiting = sorted(aborted)
    while llm.has_unfinished_requests():
        finished |= {output.request_id: output for output in llm.step() if output.finished}
        if waiting and rng.random() < 0.5:
            llm.abort_request([waiting.pop()])
    kept = [i for i in range(24) if f"abort-{i}" not in aborted]
    assert token_ids([finished[f"abort-{i}"] for i in kept]) == [expected[i] for i in kept]
    core = llm.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    llm.add_request("last", prompts[0], params)  # one more step, so that the worker hears of the ends
    while llm.has_unfinished_requests():
        llm.step()
    assert not core.scheduler.requests and len(runner.requests) <= 1  # the last one's end is not told yet
    assert len(runner._drafts) <= 1 and not core.scheduler._trees
    assert core.scheduler.kv_cache_manager.usage == 0


def test_a_raising_drafter_costs_speed_only(engine, monkeypatch, caplog):
    prompts = make_prompts(8)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = answers_of(engine(), prompts, params)
    llm = engine("eagle")
    calls = unlucky_drafter(monkeypatch)
    assert answers_of(llm, prompts, params) == expected
    assert len(calls) > 9 and sum("out of luck" in record.getMessage() for record in caplog.records) == 1
