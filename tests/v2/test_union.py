"""Unions on the V2 model runner: the tokens of plain decoding, and trees merged as the host would."""

from __future__ import annotations

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup, warmup_kernels

from tests.hosts.conftest import runner_of
from tests.unit.proposers.test_union import check_device
from tests.v2.conftest import ENGINE, SAMPLED, SCARCE, answers, check_greedy, check_preemption, same
from vllm_specplug.gpu.drafters.eagle import TreeEagleSpeculator
from vllm_specplug.gpu.drafters.heads import HeadsSpeculator
from vllm_specplug.gpu.sampler import TreeRejectionSampler
from vllm_specplug.proposers.union import device_proposer

PROVEN = True
EAGLE = {"method": "eagle2", "num_speculative_tokens": 9, "draft_depth": 3, "draft_top_k": 3}
MEDUSA = {"method": "medusa", "tree": [[0], [1], [0, 0], [2], [0, 1], [0, 0, 0]]}
LOOKUP = {"method": "lookup", "num_speculative_tokens": 8, "draft_depth": 5, "traffic_tokens": 1024}


@pytest.fixture(scope="module")
def mixed(prompts):
    """New text, which drafters know, and repeated text, which is to be found."""
    return [*prompts[:2], {"prompt_token_ids": prompts[2]["prompt_token_ids"][:9] * 3}]


@pytest.fixture(scope="module")
def expected(plainly, mixed):
    return plainly(mixed)


@pytest.fixture(scope="module")
def start(engine, checkpoints, heads):
    """``start(drafter, **engine_options)``: an engine that merges it with lookup."""

    def make(drafter, engine=engine, **options):
        source = {**(MEDUSA if drafter == heads else EAGLE), "model": str(checkpoints[drafter])}
        union = {"method": "union", "sources": [source, LOOKUP], "num_speculative_tokens": 12, "budget": "fixed"}
        return engine(speculative_config=union, **{**ENGINE, **options})

    return make


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("drafter", "kind", "drafted_by"),
    [("eagle", TreeEagleSpeculator, {1, 2, 3}), ("medusa", HeadsSpeculator, {1, 2})],
)
def test_greedy(start, mixed, expected, drafter, kind, drafted_by, monkeypatch):
    """And no value is read back; what was merged is checked behind it."""
    merged, honest = [], device_proposer.merge_drafts

    def merge_drafts(drafts, num_nodes, merging):
        merged.append((drafts, num_nodes, merging.weights.clone()))
        return honest(drafts, num_nodes, merging)

    monkeypatch.setattr(device_proposer, "merge_drafts", merge_drafts)
    llm = start(drafter)
    merged.clear()
    check_greedy(llm, kind, mixed, expected, 1.5, monkeypatch)
    bits = [check_device(*args).source_bits.flatten() for args in merged]
    assert set(torch.cat(bits).tolist()) - {0} == drafted_by  # the drafter, lookup, both


def test_same_seed_same_tokens(start, mixed, plainly):
    assert same(answers(start("eagle"), mixed, SAMPLED), plainly(mixed, SAMPLED))


def test_forced_preemption_and_chunked_prefill(start, mixed, expected):
    check_preemption(start("eagle", **SCARCE), mixed, expected)


def test_one_source(engine, mixed, expected):
    """Of more nodes than the union takes."""
    llm = engine(
        speculative_config={"method": "union", "sources": [LOOKUP], "num_speculative_tokens": 5, "budget": "fixed"},
        **ENGINE,
    )
    assert same(answers(llm, mixed), expected)


def test_what_the_host_runs_before_it_serves_on_cuda(start, mixed, expected, monkeypatch):
    """Steps of its own making, with every sampling parameter, and with and without drafts side by side."""
    llm = start("eagle")
    runner, worker = runner_of(llm), llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
        # The host's kernel, which the interpreter refuses.
        monkeypatch.setattr(runner.structured_outputs_worker, "apply_grammar_bitmask", lambda *_: None)
    # An earlier test's last requests keep their places until the next step.
    monkeypatch.setattr(runner.scheduler_config, "max_num_seqs", 2)
    walks, honest = [], TreeRejectionSampler.walk_by_depth
    monkeypatch.setattr(TreeRejectionSampler, "walk_by_depth", lambda *args: walks.append(args) or honest(*args))
    warmup_kernels(runner, worker.execute_model, worker.sample_tokens)
    assert run_mixed_prefill_decode_warmup(runner, worker.execute_model, worker.sample_tokens, 20)
    assert len(walks) > 2
    llm.reset_prefix_cache()  # they wrote to blocks of their own choice
    assert same(answers(llm, mixed), expected)


@pytest.mark.parametrize("drafter", ["eagle", "medusa"])
def test_graphs_are_forgotten_with_their_cache(start, drafter):
    """The host records some on a small cache, to measure them, and warms up on the real one before it records all."""
    speculator = runner_of(start(drafter)).speculator
    growths = speculator._growths.values()
    for growth in growths:
        growth._recorded[8] = None
    speculator.init_cudagraph_manager(CUDAGraphMode.NONE)
    assert growths and not any(growth._recorded for growth in growths)


@pytest.mark.wide
@pytest.mark.parametrize("drafter", ["eagle", "medusa"])
def test_cuda_graphs(graph_engine, start, mixed, expected, drafter):
    """Verification, drafters, search and merge from recorded graphs."""
    llm = start(drafter, engine=graph_engine, async_scheduling=True, max_num_seqs=3)
    assert same(answers(llm, mixed), expected)
