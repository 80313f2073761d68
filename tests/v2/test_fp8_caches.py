"""KV caches with fewer bits than the model: the answers of the same engine without drafts."""

from __future__ import annotations

import pytest
import torch

from tests.hosts.conftest import TREE as WHOLE_TREE
from tests.hosts.conftest import acceptance_length
from tests.hosts.test_attention_traits import layers_of
from tests.v2.conftest import ENGINE, GREEDY, answers, same
from tests.v2.test_identity import TREE
from vllm_specplug.gpu import attention as paged
from vllm_specplug.gpu.attention import TreeImpl

PLAINLY = GREEDY.clone()
PLAINLY.extra_args = {"speculation": False}
#: By KV head, as some checkpoints give them.
FACTORS = {"_k_scale": torch.tensor([0.21, 0.13]), "_v_scale": torch.tensor([0.4, 0.05])}


def anew(llm, prompts, params=GREEDY):
    llm.reset_prefix_cache()
    return answers(llm, prompts, params)


def start(engine, form):
    return engine("eagle", {**WHOLE_TREE, **TREE}, kv_cache_dtype=form, num_gpu_blocks_override=24, **ENGINE)  # all are scaled


def not_rounded(monkeypatch):
    """Tree rows keep the bits that the model computed."""
    honest, numbers, computed = TreeImpl._attend_trees, TreeImpl.numbers, []

    def attend(self, layer, query, key, value, *rest):
        computed[:] = key / layer._k_scale.view(-1, 1), value / layer._v_scale.view(-1, 1)
        honest(self, layer, query, key, value, *rest)

    monkeypatch.setattr(TreeImpl, "_attend_trees", attend)
    monkeypatch.setattr(paged, "rows_in_pages", lambda *_: computed)
    monkeypatch.setattr(TreeImpl, "numbers", lambda self, x: numbers(self, x) if x.dtype == torch.uint8 else x)


def test_fp8(engine, prompts, plain, monkeypatch):
    llm = start(engine, "fp8")
    expected = anew(llm, prompts, PLAINLY)
    assert not same(expected, plain), "8 bits change nothing"
    assert same(anew(llm, prompts), expected)
    assert acceptance_length(llm) > 1.2
    for layer in layers_of(llm).values():
        for name, factors in FACTORS.items():
            monkeypatch.setattr(layer, name, factors[: layer.num_kv_heads])
    scaled = anew(llm, prompts, PLAINLY)
    assert not same(scaled, expected), "factors change nothing"
    assert same(anew(llm, prompts), scaled)
    not_rounded(monkeypatch)
    assert not same(anew(llm, prompts), scaled)
    llm.reset_prefix_cache()


@pytest.mark.interpreted
def test_the_kernel_reads_8_bits(engine, prompts):
    llm = start(engine, "fp8")
    assert same(anew(llm, prompts[:1]), anew(llm, prompts[:1], PLAINLY))


def test_16_bits_of_a_model_of_32(engine, prompts, plain):
    llm = start(engine, "bfloat16")
    expected = anew(llm, prompts, PLAINLY)
    assert not same(expected, plain), "16 bits change nothing"
    assert same(anew(llm, prompts), expected)


def test_third_party_kernels_are_refused(engine):
    llm = start(engine, "fp8")
    layers = layers_of(llm)
    with pytest.raises(ValueError, match="reads no fp8 KV cache: use tree_attention='triton'"):
        paged.use_tree_attention(layers, "flash")
