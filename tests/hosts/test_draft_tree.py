"""Trees from a small model: the tokens are those of plain vLLM, and drafts are accepted."""

from __future__ import annotations

import pytest

from tests.doubles import tiny
from tests.hosts.conftest import (
    SEEDED,
    WHOLE,
    acceptance_length,
    check_prefix_cache_hits,
    counters,
    make_prompts,
    runner_of,
    token_ids,
)
from tests.hosts.test_architectures import PARAMS, PROMPTS

TREE = {"method": "draft_tree", "num_speculative_tokens": 12, "draft_depth": 4, "draft_top_k": 3, **WHOLE}
SETTINGS = {"block_size": 32, "kv_cache_memory_bytes": 8 << 20}


@pytest.fixture(scope="module")
def small(checkpoints, tmp_path_factory) -> str:
    """The target's own layers but the last, with a head of their own: it is often right."""
    checkpoints["small"] = tiny.write_sibling(tmp_path_factory.mktemp("sibling") / "small", checkpoints["target"])
    return "small"


def test_same_as_plain(engine, small):
    """Greedy and seeded; too few KV blocks, chunked prefill, then prompts that continue answers."""
    plain = engine(**SETTINGS)
    expected = token_ids(plain.generate(PROMPTS, PARAMS, use_tqdm=False))
    scarce = {"num_gpu_blocks_override": 12, "max_num_batched_tokens": 64}
    llm = engine(small, TREE, **scarce, **SETTINGS)
    assert token_ids(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
    assert counters(llm)["preemptions"] > 0
    assert acceptance_length(llm) > 1.5
    assert runner_of(llm).drafter.draft_layers
    prompts = make_prompts(4)
    expected = token_ids(plain.generate(prompts, SEEDED, use_tqdm=False))
    assert token_ids(llm.generate(prompts, SEEDED, use_tqdm=False)) == expected
    check_prefix_cache_hits(plain, llm, PROMPTS[:2])
