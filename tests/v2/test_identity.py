"""Token identity with plain decoding on the V2 model runner, in float32."""

from __future__ import annotations

import pytest
import torch
from vllm import SamplingParams

from tests.hosts.conftest import acceptance_length, check_prefix_cache_hits, make_prompts, token_ids

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
TREE = {"num_speculative_tokens": 12, "draft_depth": 4, "draft_top_k": 3}
CHAIN = {"num_speculative_tokens": 3, "draft_depth": 3, "draft_top_k": 1}
#: Blocks of 32 tokens, so that contexts span several.
BLOCKS = {"block_size": 32}


@pytest.fixture(scope="module")
def prompts():
    return make_prompts(12)


@pytest.fixture(scope="module")
def plain(engine, prompts):
    return token_ids(engine(**BLOCKS).generate(prompts, GREEDY, use_tqdm=False))


def runner_of(llm):
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


@pytest.mark.parametrize("tree", [TREE, CHAIN], ids=["tree", "chain"])
def test_greedy(engine, prompts, plain, tree):
    llm = engine("eagle", tree, **BLOCKS)
    assert type(runner_of(llm)).__name__.startswith("Tree")
    assert runner_of(llm).scheduler_config.async_scheduling  # the host's default on V2, kept
    assert token_ids(llm.generate(prompts, GREEDY, use_tqdm=False)) == plain
    assert acceptance_length(llm) > 1.3  # else trees would not have been exercised
