"""Targets whose attention is more than plain softmax over all tokens: token identity with plain vLLM, in the engine."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from vllm import LLM, SamplingParams
from vllm.model_executor.layers.attention import Attention

from tests.doubles import knowing, tiny
from tests.host_versions import TAKES_FLOAT32_SINKS
from tests.hosts.conftest import ENGINE, acceptance_length, answers_of, make_prompts, runner_of
from vllm_specplug import proposer
from vllm_specplug.core.tree_rows import CpuTreeRows

PROVEN = True
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
WINDOW = 16
CHUNK = 128  # a block of the KV cache
SIZES = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": tiny.HIDDEN,
    "intermediate_size": tiny.INTERMEDIATE,
    "num_hidden_layers": 4,
    "num_attention_heads": tiny.HEADS,
    "num_key_value_heads": tiny.KV_HEADS,
    "head_dim": tiny.HEAD_DIM,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
#: Config class of transformers, and its fields.
TARGETS = {
    "sliding window": ("MistralConfig", {"sliding_window": WINDOW}),
    "alternating windows, soft caps": (
        "Gemma2Config",
        {**ALTERNATING, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 32},
    ),
    "sinks": ("GptOssConfig", {**ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "ALiBi": ("BloomConfig", {"num_attention_heads": 2}),
    "chunks": (
        "Llama4TextConfig",
        {
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": tiny.INTERMEDIATE,
            "attention_chunk_size": CHUNK,
        },
    ),
    "shared KV": (
        "Gemma3nTextConfig",
        {
            **ALTERNATING,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": tiny.VOCAB,
            "hidden_size_per_layer_input": 32,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 4,
            "intermediate_size": [tiny.INTERMEDIATE] * 4,
        },
    ),
}


def write_target(path: Path, name: str) -> Path:
    """A random model whose attention is sharp."""
    config_class, fields = TARGETS[name]
    config = getattr(transformers, config_class)(**{**SIZES, **fields})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 1:
                weight.add_(0.1 * noise)
            elif weight is model.get_input_embeddings().weight:
                # Else a model whose LM head is its embedding repeats the last token.
                weight.copy_(noise * (0.05 if config.tie_word_embeddings else 1.0))
            else:
                sharp = any(part in parameter_name for part in ("q_proj", "k_proj", "query_key_value"))
                weight.copy_(noise * (2.0 if sharp else 0.7) / weight.shape[-1] ** 0.5)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def targets(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("traits")
    return {name: write_target(root / name.replace(" ", "-"), name) for name in TARGETS}


@pytest.fixture
def known(monkeypatch):
    """Serves the method ``knowing``."""
    ours = proposer._registered()
    entry = EntryPoint(name="knowing", value="tests.doubles.knowing:KNOWING", group=proposer.GROUP)
    monkeypatch.setattr(proposer, "_registered", lambda: {**ours, "knowing": entry})
    monkeypatch.setattr(knowing, "ANSWERS", [])
    proposer.find_method.cache_clear()
    yield knowing.ANSWERS
    proposer.find_method.cache_clear()


@pytest.fixture
def serve(engine, known, expert_group):
    """``serve(target, prompts, **options)``: plain vLLM's answers, and an engine that is told them."""

    def start(target: Path, prompts: list[dict[str, list[int]]], **options: Any) -> tuple[Any, Any]:
        settings = {**ENGINE, "max_num_seqs": 3, "max_num_batched_tokens": 64, **options}
        plain = LLM(str(target), **settings)
        engine.kept.append(plain)
        expected = answers_of(plain, prompts, GREEDY)
        for prompt, (answer,) in zip(prompts, expected, strict=True):
            known.append(prompt["prompt_token_ids"] + answer)
        llm = LLM(str(target), speculative_config={"method": "knowing", "budget": "fixed"}, **settings)
        engine.kept.append(llm)
        return expected, llm

    return start


def layers_of(llm: Any) -> dict[str, Any]:
    layers = runner_of(llm).compilation_config.static_forward_context
    return {name: layer for name, layer in layers.items() if isinstance(layer, Attention)}


@pytest.mark.parametrize(
    "name, faults",
    [
        ("sliding window", [{"window": WINDOW + 1}, {"window": WINDOW - 1}]),
        ("alternating windows, soft caps", [{"soft_cap": 0.0}, {"window": 0}]),
        pytest.param(
            "sinks",
            [{"sinks": None}, {"window": 0}],
            marks=pytest.mark.skipif(not TAKES_FLOAT32_SINKS, reason="vLLM serves no float32 sinks"),
        ),
        ("ALiBi", [{"alibi_slopes": None}]),
    ],
)
def test_same_as_plain(targets, serve, monkeypatch, name, faults):
    """With short chunks of prompts, so that forwards have rows of trees and others."""
    prompts = make_prompts(8)
    expected, llm = serve(targets[name], prompts, disable_hybrid_kv_cache_manager=True)
    assert answers_of(llm, prompts, GREEDY) == expected
    assert acceptance_length(llm) > 2.5
    honest = {name: layer.impl.traits for name, layer in layers_of(llm).items()}
    for fault in faults:
        with monkeypatch.context() as patch:
            for layer_name, layer in layers_of(llm).items():
                traits = honest[layer_name]
                if traits.window or "window" not in fault:
                    patch.setattr(layer.impl, "traits", replace(traits, **fault))
            assert answers_of(llm, prompts, GREEDY) != expected, fault


def test_layers_that_share_keys_and_values(targets, serve, monkeypatch):
    prompts = make_prompts(8)
    expected, llm = serve(targets["shared KV"], prompts, disable_hybrid_kv_cache_manager=True)
    assert sum(layer.impl.kv_sharing_target_layer_name is not None for layer in layers_of(llm).values()) == 2
    honest, only_trees = CpuTreeRows.rows_of, set()

    def rows_of(self, layer_name):
        only_trees.add(self.all_rows)
        return honest(self, layer_name)

    monkeypatch.setattr(CpuTreeRows, "rows_of", rows_of)
    assert answers_of(llm, prompts, GREEDY) == expected
    assert acceptance_length(llm) > 2.5 and only_trees == {True, False}

    def one_row_off(self, layer_name):
        key, value, start = honest(self, layer_name)
        return key.roll(1, 0), value.roll(1, 0), start

    monkeypatch.setattr(CpuTreeRows, "rows_of", one_row_off)
    assert answers_of(llm, prompts, GREEDY) != expected


def test_float16(engine):
    """A step over more rows may round differently, so that a few answers may differ from plain vLLM's."""
    prompts = make_prompts(32)
    expected = answers_of(engine(dtype="float16"), prompts, GREEDY)
    llm = engine("eagle", dtype="float16")
    found = answers_of(llm, prompts, GREEDY)
    assert acceptance_length(llm) > 1.3
    assert sum(ours == theirs for ours, theirs in zip(found, expected, strict=True)) > 28
