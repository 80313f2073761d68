"""Two tensor-parallel ranks on the CPU engine, in processes of their own: plain decoding's tokens, on both ranks."""

from __future__ import annotations

import functools
import os
import shutil
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams
from vllm.platforms.cpu import CpuPlatform

from tests.doubles import tiny
from tests.doubles.constants import with_constants
from tests.doubles.forked import answer_in_new_process, needs_two_cores
from tests.hosts.conftest import ENGINE, SWIFT, TREE, acceptance_length, make_prompts, needs_bytes, some, token_ids
from vllm_specplug.proposers.eagle2.checkpoint import save_head
from vllm_specplug.proposers.medusa.heads import MedusaHeads
from vllm_specplug.proposers.swift.options import SwiftOptions
from vllm_specplug.utils.published import publish


def kept(worker):
    runner = worker.model_runner
    if not hasattr(runner, "serving_budget"):  # plain
        return None
    swift = getattr(runner.drafter, "state", None)
    version = getattr(runner.reloading, "version", None)
    found = {"tokens": runner.input_batch.token_ids_cpu.tolist(), "version": version, "weights": weights(runner)}
    return found | {
        "decides": bool(getattr(runner.serving_budget, "budget", None)),
        "searched": swift and swift.search.all_steps,
    }


def weights(runner):
    model = getattr(runner.drafter, "model", None)
    return model and float(model.model.layers[0].post_attention_layernorm.weight.sum())


def lose_time(worker):
    """Let drafts and SWIFT's search take any time: on two ranks of a busy machine they may not pay."""
    budget = getattr(getattr(worker.model_runner, "serving_budget", None), "budget", None)
    if budget is not None:
        budget.left, budget.planner._change_arm = 1e9, lambda *_: None
    drafter = worker.model_runner.drafter
    if isinstance(getattr(drafter, "options", None), SwiftOptions):  # the window fits in short answers
        with_constants(drafter.options, draft_depth=5, context_window=8)
        drafter.ledger.max_delay = 1.0


def ray_serves_cpus():
    """vLLM starts Ray's actors for devices that Ray counts."""
    CpuPlatform.ray_device_key = "GPU"


def program(model: str, options: dict, runs: tuple[float, ...], new_version: tuple[str, ...]) -> dict:
    """Answer in two ranks; see ``run``."""
    if "distributed_executor_backend" in options:
        import ray

        ray_serves_cpus()
        os.environ.update(RAY_raylet_start_wait_time_s="300", RAY_USAGE_STATS_ENABLED="0")
        ray.init(num_gpus=2, include_dashboard=False, runtime_env={"worker_process_setup_hook": ray_serves_cpus})
    llm = LLM(model, **ENGINE | options)
    llm.collective_rpc(lose_time)
    results = []
    for number, temperature in enumerate(runs):
        if number == 1 and new_version:
            head, new = new_version
            publish(head, functools.partial(shutil.copytree, new, dirs_exist_ok=True), {})
            time.sleep(3)  # it is looked for once a second
        outputs = llm.generate(make_prompts(8, seed=7), make_params(temperature), use_tqdm=False)
        results.append({"tokens": token_ids(outputs), "ranks": llm.collective_rpc(kept)})
    tau = acceptance_length(llm) if llm.llm_engine.vllm_config.speculative_config else 1
    if "distributed_executor_backend" in options:
        # Else the end of this process ends the ranks after Ray has ended, and may crash.
        llm.llm_engine.engine_core.shutdown()
    return {"results": results, "tau": tau}


def make_params(temperature: float) -> list[SamplingParams]:
    """A temperature for every second request; one has no seed."""
    return [
        SamplingParams(temperature=temperature * (i % 2), seed=None if i == 3 else i, max_tokens=30, ignore_eos=True)
        for i in range(8)
    ]


needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")

UNION = {
    "method": "union",
    "sources": [{key: value for key, value in TREE.items() if key != "budget"}, {"method": "lookup"}],
    "num_speculative_tokens": 16,
}


def run(
    model: Path,
    speculative: dict | None,
    folder: Path,
    runs: tuple[float, ...] = (0.8,),
    new_version: tuple[str, ...] = (),
    **options,
) -> dict:
    """Answer in two ranks; ``new_version``: a published folder, and a checkpoint to publish after the first run."""
    options = {"tensor_parallel_size": 2, "speculative_config": speculative, **options}
    worker = "vllm_specplug.cpu.worker"
    return answer_in_new_process(program, worker, folder, str(model), options, runs, new_version)


@pytest.fixture(scope="module")
def plain(engine):
    """Plain vLLM's answers of one rank, by target and temperature."""

    @functools.cache
    def answers(temperature: float = 0.8, target: str = "target") -> list:
        outputs = engine(target=target).generate(make_prompts(8, seed=7), make_params(temperature), use_tqdm=False)
        return token_ids(outputs)

    return answers


def seeded(tokens: list) -> list:
    """Without the request that has neither a seed nor temperature 0."""
    return tokens[:3] + tokens[4:]


def check_ranks(result: dict) -> None:
    """Both ranks have the same tokens in their batches, those of the unseeded request too."""
    first, second = (rank["tokens"] for rank in result["ranks"])
    assert first == second


def with_model(speculative: dict, path: Path) -> dict:
    sources = [{**one, "model": str(path)} if one["method"] != "lookup" else one for one in speculative["sources"]]
    return {**speculative, "sources": sources}


@needs_two_cores
@pytest.mark.parametrize("budget", some(["fixed", "measured"], ["fixed"]))
def test_same_as_plain(checkpoints, plain, tmp_path, budget):
    """A union of a drafter with a reduced vocabulary (its rows of the LM head lie on both ranks) and lookup."""
    union = {**with_model(UNION, checkpoints["reduced"]), "budget": budget}
    found = run(checkpoints["target"], union, tmp_path)
    (result,) = found["results"]
    assert seeded(result["tokens"]) == seeded(plain())
    check_ranks(result)
    if budget == "fixed":
        assert found["tau"] > 1.1
    else:
        assert [rank["decides"] for rank in result["ranks"]] == [True, False]


@needs_two_cores
@pytest.mark.wide
def test_measured_budget_of_levels(checkpoints, plain, tmp_path):
    """Whether one more level is drafted depends on the clock; at once with a second round, whose costs were learned."""
    speculative = {**TREE, "model": str(checkpoints["eagle"]), "budget": "measured"}
    found = run(checkpoints["target"], speculative, tmp_path, (0.8, 0.8))
    for result in found["results"]:
        assert seeded(result["tokens"]) == seeded(plain())
        check_ranks(result)


@needs_two_cores
@pytest.mark.wide
def test_medusa(checkpoints, plain, tmp_path):
    save_head(tmp_path / "medusa", {}, MedusaHeads(3, 1, tiny.HIDDEN).checkpoint_state())
    medusa = {"method": "medusa", "model": str(tmp_path / "medusa"), "num_speculative_tokens": 8}
    (result,) = run(checkpoints["target"], medusa, tmp_path)["results"]
    assert seeded(result["tokens"]) == seeded(plain())
    check_ranks(result)


@needs_two_cores
@pytest.mark.wide
def test_swift(checkpoints, plain, tmp_path):
    """The first rank searches for layer sets; the other one runs the same forwards."""
    found = run(checkpoints["deep"], {**SWIFT, "budget": "measured"}, tmp_path)
    (result,) = found["results"]
    assert seeded(result["tokens"]) == seeded(plain(target="deep"))
    check_ranks(result)
    assert result["ranks"][0]["searched"] > result["ranks"][1]["searched"] == 0


@needs_two_cores
@pytest.mark.wide
@pytest.mark.parametrize("verification", ["typical", "rejection"])
def test_verification(checkpoints, plain, tmp_path, verification):
    """Both draw random numbers or take other tokens than plain decoding; greedy requests do not."""
    speculative = {**TREE, "model": str(checkpoints["eagle"]), "verification": verification}
    found = run(checkpoints["target"], speculative, tmp_path, (0.8, 0.0))
    sampled, greedy = found["results"]
    check_ranks(sampled)
    assert greedy["tokens"] == plain(0.0)
    assert sampled["tokens"][::2] == plain(0.0)[::2]
    assert found["tau"] > 1.1


@needs_two_cores
@needs_bytes
@pytest.mark.wide
def test_draft_int8(checkpoints, plain, tmp_path):
    speculative = {**TREE, "model": str(checkpoints["eagle"]), "draft_int8": True}
    found = run(checkpoints["target"], speculative, tmp_path)
    (result,) = found["results"]
    assert seeded(result["tokens"]) == seeded(plain())
    check_ranks(result)
    assert found["tau"] > 1.1


@needs_two_cores
@pytest.mark.wide
@pytest.mark.parametrize("kind", ["reduced", "eagle3"])
def test_both_ranks_take_a_new_version(checkpoints, plain, tmp_path, kind):
    """Weights that each rank has a part of, and a draft vocabulary; the ranks draft the same in every step."""
    head, new = tmp_path / "head", tmp_path / "new"
    publish(head, lambda folder: shutil.copytree(checkpoints[kind], folder, dirs_exist_ok=True), {})
    shutil.copytree(checkpoints[kind], new)
    tensors = load_file(new / "model.safetensors")
    name = next(name for name in tensors if name.endswith("post_attention_layernorm.weight"))
    tensors[name] *= 1.5
    save_file(tensors, new / "model.safetensors")
    speculative = {**TREE, "model": str(head), "reload": True}
    found = run(checkpoints["target"], speculative, tmp_path, (0.8, 0.8, 0.8, 0.8), (str(head), str(new)))
    for result in found["results"]:
        assert seeded(result["tokens"]) == seeded(plain())
        check_ranks(result)
    before, after = (found["results"][place]["ranks"] for place in (0, -1))
    assert [[rank["version"] for rank in ranks] for ranks in (before, after)] == [[1, 1], [2, 2]]
    assert all(new["weights"] == pytest.approx(1.5 * old["weights"]) for old, new in zip(before, after, strict=True))


@needs_two_cores
@needs_ray
@pytest.mark.wide
def test_ray(checkpoints, plain, tmp_path):
    """Its ranks are not forked: they load the plugin themselves."""
    speculative = {**TREE, "model": str(checkpoints["eagle"]), "budget": "measured"}
    found = run(checkpoints["target"], speculative, tmp_path, distributed_executor_backend="ray")
    (result,) = found["results"]
    assert seeded(result["tokens"]) == seeded(plain())
    check_ranks(result)
