"""KV caches of 8 bits: tokens are plain vLLM's, the proof passes, and a wrong factor shows."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams

from tests.hosts.conftest import SEEDED, acceptance_length, make_prompts, needs_avx512, runner_of, token_ids
from tests.hosts.test_attention_traits import layers_of
from tests.hosts.test_proof import kept_nothing, prove_again  # noqa: F401
from vllm_specplug.cpu.attention import TreeAttentionImpl
from vllm_specplug.vllm.proof import attention as attention_proof

pytestmark = needs_avx512  # vLLM's fp8 caches need it
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
SCARCE = {"num_gpu_blocks_override": 14, "block_size": 32, "max_num_batched_tokens": 48}
#: As a checkpoint's: numbers are divided by them before they are rounded.
SCALES = {"_k_scale_float": 0.11, "_v_scale_float": 0.07}


def answers(llm, params):
    return token_ids(llm.generate(make_prompts(12), params, use_tqdm=False))


def scale(monkeypatch: pytest.MonkeyPatch, llm: Any) -> None:
    llm.reset_prefix_cache()
    for layer in layers_of(llm).values():
        for name, value in SCALES.items():
            monkeypatch.setattr(layer, name, value)


@pytest.mark.parametrize("form", ["fp8", "fp8_e5m2"])
def test_same_as_plain(engine, monkeypatch, form):
    """With preemptions, chunks of prompts and factors; a drafter's own layer has such a cache too."""
    plain = engine(kv_cache_dtype=form, block_size=32)
    llm = engine("eagle", kv_cache_dtype=form, **SCARCE)
    expected = answers(plain, GREEDY)
    assert answers(llm, GREEDY) == expected != answers(engine(block_size=32), GREEDY)
    assert answers(llm, SEEDED) == answers(plain, SEEDED)
    assert acceptance_length(llm) > 1.2
    for one in (plain, llm):
        scale(monkeypatch, one)
    scaled = answers(plain, GREEDY)
    assert answers(llm, GREEDY) == scaled != expected


@pytest.mark.parametrize("form", ["fp8", "fp8_e5m2"])
def test_the_proof_passes(engine, kept_nothing, monkeypatch, form):  # noqa: F811
    llm = engine("eagle", kv_cache_dtype=form, dtype="bfloat16", max_num_seqs=6)
    scale(monkeypatch, llm)
    prove_again(llm)
    assert attention_proof.fault_of_attention(runner_of(llm)) == ""
    honest = TreeAttentionImpl.scales
    monkeypatch.setattr(TreeAttentionImpl, "scales", lambda self, layer: (honest(self, layer)[0], 1.0))
    assert "differs from vLLM's" in attention_proof.fault_of_attention(runner_of(llm))
