"""KV caches of 8 bits: tokens are plain vLLM's, the proof passes, and wrong rounding or factors show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.hosts.conftest import SEEDED, acceptance_length, answers_of, make_prompts, needs_avx512, runner_of
from tests.hosts.test_attention_traits import layers_of
from tests.hosts.test_proof import prove_again
from vllm_specplug.core.proof import ProofFailed
from vllm_specplug.cpu.attention import TreeAttentionImpl
from vllm_specplug.utils import proof_files
from vllm_specplug.vllm.attention_backends import FP8
from vllm_specplug.vllm.proof import attention as attention_proof

pytestmark = needs_avx512  # vLLM's fp8 caches need it
PROVEN = True
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
SCARCE = {"num_gpu_blocks_override": 14, "block_size": 32, "max_num_batched_tokens": 48}
#: As a checkpoint's: numbers are divided by them before they are rounded.
SCALES = {"_k_scale_float": 0.11, "_v_scale_float": 0.07}


def answers(llm, params):
    return answers_of(llm, make_prompts(12), params)


def nearest(self: TreeAttentionImpl, layer: Any, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Round to the nearest numbers; vLLM's operator truncates."""
    pairs = ((key, layer._k_scale_float), (value, layer._v_scale_float))
    return tuple((rows.float() / factor).to(FP8[self.kv_cache_dtype]).view(torch.uint8) for rows, factor in pairs)


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
def test_the_proof_passes(engine, monkeypatch, tmp_path, form):
    llm = engine("eagle", kv_cache_dtype=form, dtype="bfloat16", max_num_seqs=6)
    monkeypatch.setattr(proof_files, "FOLDER", tmp_path)  # the proof at its start was kept
    scale(monkeypatch, llm)
    with monkeypatch.context() as patch, pytest.raises(ProofFailed, match="differs from plain decoding"):
        patch.setattr(TreeAttentionImpl, "as_stored", nearest)
        prove_again(llm)  # first: a proof that passes is kept
    prove_again(llm)
    assert attention_proof.fault_of_attention(runner_of(llm)) == ""
    honest = TreeAttentionImpl.scales
    monkeypatch.setattr(TreeAttentionImpl, "scales", lambda self, layer: (honest(self, layer)[0], 1.0))
    assert "differs from vLLM's" in attention_proof.fault_of_attention(runner_of(llm))
