"""Multi-head latent attention (MLA): the proof at start finds faults of it; what is refused.

Identity with plain vLLM and equal bits: ``test_architectures.py`` and ``test_same_bits.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM
from vllm.distributed import parallel_state
from vllm.model_executor.layers.attention import MLAAttention

from tests.doubles.architectures import ARCHITECTURES, write_target
from tests.hosts.conftest import ENGINE, runner_of
from tests.hosts.test_proof import FAULTS, a_row_not_moved, changed_layout, prove_again
from vllm_specplug.config import ConfigError
from vllm_specplug.core.proof import ProofFailed
from vllm_specplug.cpu import kv, mla
from vllm_specplug.cpu.kernels.cpu_ops import operators
from vllm_specplug.utils import proof_files

pytestmark = pytest.mark.skipif(operators() is None, reason="latents need the operators")
PROVEN = True
#: Sizes that vLLM's own CPU kernels do not take.
SMALL = {"kv_lora_rank": 32, "qk_rope_head_dim": 16}


@pytest.fixture(scope="module")
def small(engine, tmp_path_factory) -> Iterator[Any]:
    """An engine of small latents in bfloat16."""
    path: Path = tmp_path_factory.mktemp("mla") / "target"
    deepseek = ARCHITECTURES["DeepSeek-V3"]
    write_target(path, replace(deepseek, settings={**deepseek.settings, **SMALL}))
    lookup = {"method": "lookup", "budget": "fixed"}
    with pytest.MonkeyPatch.context() as patch:
        if parallel_state.model_parallel_is_initialized() and parallel_state._EP is None:  # see ``expert_group``
            patch.setattr(parallel_state, "_EP", parallel_state.get_tp_group())
        engine.kept.append(
            LLM(str(path), **{**ENGINE, "dtype": "bfloat16", "max_num_seqs": 6}, speculative_config=lookup)
        )
        yield engine.kept[-1]


def rotary_position_off_by_one(monkeypatch):
    def late(tree, context_lens, honest):
        return {"positions": honest.positions + (tree.depths > 0)}

    changed_layout(monkeypatch, late)


def a_latent_beside_its_place(monkeypatch):
    """Latents of accepted rows are read from the row above."""
    honest = kv.write_rows

    def write_rows(kept, caches, layout, rows, slots):
        honest(kept, caches, layout, (rows - 1).clamp(min=0), slots)

    monkeypatch.setattr(kv, "write_rows", write_rows)


def impls_of(llm: Any) -> list[mla.TreeMLAImpl]:
    layers = runner_of(llm).compilation_config.static_forward_context.values()
    return [layer.impl for layer in layers if isinstance(layer, MLAAttention)]


@pytest.mark.usefixtures("expert_group")
def test_the_proof_finds_faults(small, monkeypatch, tmp_path):
    monkeypatch.setattr(proof_files, "FOLDER", tmp_path)
    assert {type(impl) for impl in impls_of(small)} == {mla.TreeMLAImpl}
    prove_again(small)
    (result,) = proof_files.kept()
    assert result["in_bits"] == 1 and result["difference"] == 0 < result["control"]
    assert a_row_not_moved in FAULTS
    for fault in (*FAULTS, rotary_position_off_by_one, a_latent_beside_its_place):
        kept = tmp_path / fault.__name__
        with monkeypatch.context() as patch:
            patch.setattr(proof_files, "FOLDER", kept)
            fault(patch)
            with pytest.raises(ProofFailed, match=r"differs from plain decoding in \d+ of \d+ logits"):
                prove_again(small)


def other_scale(monkeypatch, impls):
    honest = mla.causal_attention
    monkeypatch.setattr(mla, "causal_attention", lambda *args: honest(*args[:-1], 1.2 * args[-1]))


def no_rotary_part(monkeypatch, impls):
    honest = mla.causal_attention

    def causal_attention(query, *args):
        query[..., impls[0].kv_lora_rank :] = 0
        honest(query, *args)

    monkeypatch.setattr(mla, "causal_attention", causal_attention)


@pytest.mark.parametrize("fault", [other_scale, no_rotary_part])
def test_what_trees_and_plain_steps_share_is_compared(small, monkeypatch, tmp_path, fault):
    monkeypatch.setattr(proof_files, "FOLDER", tmp_path)
    fault(monkeypatch, impls_of(small))
    with pytest.raises(ProofFailed, match="attention of .* differs from vLLM's by"):
        prove_again(small)


def test_what_the_kernel_does_not_read_is_refused(monkeypatch):
    monkeypatch.setattr(mla.CPUMLAImpl, "__init__", lambda self, **sizes: vars(self).update(sizes))
    sizes = {"kv_lora_rank": 32, "head_size": 48, "qk_rope_head_dim": 16, "kv_cache_dtype": "auto"}
    mla.TreeMLAImpl(**sizes)
    with pytest.raises(ConfigError, match="multiples of 16: found kv_lora_rank=24, qk_rope_head_dim=16"):
        mla.TreeMLAImpl(**{**sizes, "kv_lora_rank": 24})
    with pytest.raises(ConfigError, match="16 bits or more: found --kv-cache-dtype fp8_e5m2, use auto"):
        mla.TreeMLAImpl(**{**sizes, "kv_cache_dtype": "fp8_e5m2"})
    monkeypatch.setattr(mla, "operators", lambda: None)
    with pytest.raises(ConfigError, match="with the C.. operators only: install g"):
        mla.TreeMLAImpl(**sizes)
