"""Token identity with plain vLLM in float32: the product's promise, in the real engine."""

from __future__ import annotations

import pytest
from vllm import SamplingParams

from tests.hosts.conftest import GREEDY, acceptance_length, answers_of, check_prefix_cache_hits, counters, make_prompts
from vllm_specplug.cpu.kernels.tree_attention import unpack_pages


@pytest.fixture(scope="module")
def prompts():
    return make_prompts(64)


def test_batch_of_8(engine, prompts, plain):
    llm = engine("eagle")
    assert answers_of(llm, prompts, GREEDY) == plain
    assert acceptance_length(llm) > 1.3  # else trees would not have been exercised


def test_batch_of_1(engine, prompts, plain):
    llm = engine("eagle")
    for prompt, answer in zip(prompts[:6], plain, strict=False):
        assert answers_of(llm, [prompt], GREEDY) == [answer]


@pytest.mark.parametrize(("drafter", "tau"), [("reduced", 1.1), ("eagle3", 1.0)])
def test_other_drafters(engine, prompts, plain, drafter, tau):
    """The LM head of "eagle3" is random: something is accepted."""
    llm = engine(drafter)
    assert answers_of(llm, prompts[:16], GREEDY) == plain[:16]
    assert acceptance_length(llm) > tau  # something is drafted, and accepted


def test_counters_are_of_one_engine(engine, prompts):
    """Else the tests that ask whether drafts were accepted would ask another engine."""
    older, newer = engine("eagle"), engine("reduced")
    before = counters(older), counters(newer)
    older.generate(prompts[:4], GREEDY, use_tqdm=False)
    assert counters(newer) == before[1]
    assert 0 < counters(older)["accepted_tokens"] - before[0]["accepted_tokens"] < 4 * 40
    assert acceptance_length(older, before[0]) > 1.3


@pytest.mark.parametrize(
    "tree",
    [
        {"draft_top_k": 1, "draft_depth": 4, "num_speculative_tokens": 4},  # EAGLE-1 chain
        {"draft_top_k": 8, "draft_depth": 6, "num_speculative_tokens": 60},
    ],
)
def test_tree_shapes(engine, prompts, plain, tree):
    assert answers_of(engine("eagle", tree), prompts[:16], GREEDY) == plain[:16]


def test_trees_that_are_cut(engine, prompts, plain):
    """Floors near what a random drafter believes: trees of every size, and none at all."""
    llm = engine("eagle", {"min_node_value": 0.0075, "min_level_value": 0.02})
    assert answers_of(llm, prompts[:16], GREEDY) == plain[:16]
    assert 0 < counters(llm)["draft_tokens"] < 20 * counters(llm)["drafts"]


def test_prefix_cache_hits_on_blocks_written_by_trees(engine, prompts):
    check_prefix_cache_hits(engine(block_size=32), engine("eagle", block_size=32), prompts[:8])
    twice = [{"prompt_token_ids": list(range(3, 103)) * 2}]
    for llm, expected in ((engine(block_size=32), 192), (engine("eagle", block_size=32), 160), (engine("eagle"), 0)):
        llm.generate(twice, GREEDY, use_tqdm=False)
        (output,) = llm.generate(twice, GREEDY, use_tqdm=False)
        assert output.num_cached_tokens == expected


def test_forced_preemption_and_chunked_prefill(engine, prompts, plain):
    """Eight requests of up to 100 tokens in 12 blocks of 32: they must be preempted."""
    long = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    expected = answers_of(engine(block_size=32), prompts[:16], long)
    few = {"num_gpu_blocks_override": 14, "enable_prefix_caching": False}
    llm = engine("eagle", block_size=32, max_num_batched_tokens=48, **few)
    assert answers_of(llm, prompts[:16], long) == expected
    assert counters(llm)["preemptions"] > 0


def test_running_into_max_model_len(engine, prompts):
    endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    expected = answers_of(engine(), prompts[:8], endless)
    assert answers_of(engine("eagle"), prompts[:8], endless) == expected


def test_torch_compile(engine, prompts, plain):
    llm = engine("eagle", enforce_eager=False)
    assert answers_of(llm, prompts[:16], GREEDY) == plain[:16]


def test_drafts_travel_with_the_output(engine, prompts, plain, monkeypatch):
    """The host need not ask for them; where they are lost, it does."""
    from vllm_specplug.cpu import runner as v1_runner

    llm = engine("eagle")
    executor, asked, sent = llm.llm_engine.engine_core.engine_core.model_executor, [], []
    ask, attach = executor.take_draft_token_ids, v1_runner.attach_drafts
    monkeypatch.setattr(executor, "take_draft_token_ids", lambda: asked.append(1) or ask())
    monkeypatch.setattr(v1_runner, "attach_drafts", lambda output, found: sent.append(found) or attach(output, found))
    assert answers_of(llm, prompts[:8], GREEDY) == plain[:8]
    assert not asked and any(any(drafts.draft_token_ids) for drafts in sent)
    tau = 8 * 40 / sum(len(drafts.req_ids) for drafts in sent)
    assert tau > 1.2  # they were verified
    monkeypatch.setattr(v1_runner, "attach_drafts", lambda output, _drafts: output)
    assert answers_of(llm, prompts[:8], GREEDY) == plain[:8]
    assert asked


def test_rejected_rows_never_reach_the_pages(engine, prompts):
    llm = engine("eagle", enable_prefix_caching=False)
    before = counters(llm)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    layers = [layer for alike in runner.alike_layers for layer in alike.layers.values()]
    for layer in layers:
        layer.kv_cache.fill_(7.0)
    (output,) = llm.generate(prompts[:1], GREEDY, use_tqdm=False)
    rejected = counters(llm)["draft_tokens"] - before["draft_tokens"]
    rejected -= counters(llm)["accepted_tokens"] - before["accepted_tokens"]
    assert rejected > 100
    computed = len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1  # the last token is not read
    for layer in layers:
        for rows in unpack_pages(layer.kv_cache, layer.isa):
            assert int((rows != 7.0).any(dim=(0, 2)).sum()) == computed
