"""Drafters of one kind or another, asked alike: the tokens of plain vLLM, and more of them than a chain gives."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams

from tests.hosts.conftest import GREEDY, acceptance_length, answers_of, counters, make_prompts

SETTINGS = {"block_size": 32, "kv_cache_memory_bytes": 8 << 20}
#: Few blocks, and prompts that are read in chunks.
SCARCE = {"num_gpu_blocks_override": 12, "max_num_batched_tokens": 64}
#: Without the ids that stand for images.
PROMPTS = [
    {"prompt_token_ids": [token_id % 150 for token_id in prompt["prompt_token_ids"]]}
    for prompt in make_prompts(8, seed=3, longest=100)
]
#: Every other request is sampled.
PARAMS = [
    SamplingParams(temperature=0.8 * (i % 2), top_p=0.95 if i % 2 else 1.0, seed=i, max_tokens=40, ignore_eos=True)
    for i in range(len(PROMPTS))
]
LONG = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)


def check_as_plain(plain: Any, llm: Any) -> float:
    """Compare greedy and seeded answers of an engine that is ``SCARCE``; return tau."""
    assert answers_of(llm, PROMPTS, PARAMS) == answers_of(plain, PROMPTS, PARAMS)
    assert counters(llm)["preemptions"] > 0
    return acceptance_length(llm)


def check_against_chain(stock: Any, llm: Any, least: float, prompts: list[dict[str, list[int]]] = PROMPTS) -> None:
    """A tree accepts at least as much as vLLM's chain of the same drafter, of as many tokens; and both accept much."""
    assert answers_of(llm, prompts, GREEDY) == answers_of(stock, prompts, GREEDY)
    assert acceptance_length(llm) >= acceptance_length(stock) > least
