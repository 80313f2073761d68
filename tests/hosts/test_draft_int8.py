"""Drafts computed in 8 bits: the drafter is quantised, and the tokens never change."""

from __future__ import annotations

import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context

from tests.doubles import tiny
from vllm_specplug.cpu.drafters.int8_linear import Int8LinearMethod
from vllm_specplug.vllm import speculative_config

from .conftest import ENGINE, TREE, answers_of, counters, make_prompts, needs_bytes, runner_of

INT8 = {**TREE, "draft_int8": True}


@needs_bytes
def test_only_the_drafter_is_rounded(engine):
    llm = engine("reduced", INT8)
    runner = runner_of(llm)

    def rounded(model):
        methods = {name: getattr(layer, "quant_method", None) for name, layer in model.named_modules()}
        return {name for name, method in methods.items() if isinstance(method, Int8LinearMethod)}

    layer = "model.layers.0"
    names = {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"}
    assert rounded(runner.drafter.model) == {"model.fc", *(f"{layer}.{name}" for name in names)}
    assert runner.drafter._scorer.head.quantised is not None
    assert not rounded(runner.model)


@needs_bytes
@pytest.mark.parametrize("drafter", ["eagle", "reduced"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_those_of_plain_decoding(engine, drafter, temperature):
    prompts = make_prompts(6, seed=11)
    sampling = SamplingParams(temperature=temperature, seed=5, max_tokens=24, ignore_eos=True)
    expected = answers_of(engine(), prompts, sampling)
    llm = engine(drafter, INT8)
    before = counters(llm)
    assert answers_of(llm, prompts, sampling) == expected
    counted = counters(llm)
    counted.subtract(before)
    assert counted["draft_tokens"] > 0


@needs_bytes
def test_a_rounded_drafter_says_nearly_the_same(engine, monkeypatch):
    """Features and logits of the whole drafter, its attention aside."""
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(3, tiny.VOCAB, (24,), generator=generator)
    hidden = torch.randn(24, tiny.HIDDEN, generator=generator)

    @torch.inference_mode()
    def said(llm):
        drafter = runner_of(llm).drafter
        attention = drafter.model.model.layers[0].self_attn.attn
        monkeypatch.setattr(attention, "forward", lambda query, key, value: query)
        with set_forward_context(None, drafter.vllm_config, num_tokens=24):
            features, _ = drafter.model(input_ids=token_ids, positions=torch.arange(24), hidden_states=hidden)
        return features, drafter._scorer.head(features)

    for rounded, whole in zip(said(engine("reduced", INT8)), said(engine("reduced", TREE)), strict=True):
        assert 0 < (rounded - whole).norm() < 0.03 * whole.norm()


def config_of(checkpoints, drafter="eagle", dtype="bfloat16", **options):
    speculative = {**TREE, "model": str(checkpoints[drafter]), **options}
    settings = {**ENGINE, "dtype": dtype, "model": str(checkpoints["target"])}
    return EngineArgs(speculative_config=speculative, **settings).create_engine_config().speculative_config


@pytest.mark.parametrize(
    ("has_vnni", "in_tiles", "dtype", "asked", "rounded"),
    [
        (True, False, "bfloat16", {}, True),
        (True, True, "bfloat16", {}, False),
        (True, True, "bfloat16", {"linear_rows": 0}, True),
        (True, True, "bfloat16", {"draft_int8": True}, True),
        (True, False, "float32", {}, False),
        (True, False, "float32", {"draft_int8": True}, True),
        (True, False, "bfloat16", {"draft_int8": False}, False),
        (False, False, "bfloat16", {}, False),
        (False, False, "float32", {"draft_int8": True}, True),
    ],
)
def test_when_drafts_are_rounded(checkpoints, monkeypatch, has_vnni, in_tiles, dtype, asked, rounded):
    monkeypatch.setattr(speculative_config, "has_vnni", lambda: has_vnni)
    monkeypatch.setattr(speculative_config, "multiplies_bytes", lambda: True)
    monkeypatch.setattr(speculative_config, "has_amx", lambda: in_tiles)
    assert config_of(checkpoints, dtype=dtype, **asked).specplug.draft_int8 is rounded


def test_a_source_is_rounded_too(checkpoints, monkeypatch):
    monkeypatch.setattr(speculative_config, "has_vnni", lambda: True)
    monkeypatch.setattr(speculative_config, "multiplies_bytes", lambda: True)
    monkeypatch.setattr(speculative_config, "has_amx", lambda: False)
    sources = [{"method": "eagle2", "model": str(checkpoints["eagle"])}, {"method": "lookup"}]
    settings = {**ENGINE, "dtype": "bfloat16", "model": str(checkpoints["target"])}
    union = {"method": "union", "sources": sources}
    config = EngineArgs(speculative_config=union, **settings).create_engine_config().speculative_config
    assert config.specplug.sources[0].draft_int8 is True


def test_compiled_drafters_are_not_mixed_up(checkpoints, monkeypatch):
    monkeypatch.setattr(speculative_config, "multiplies_bytes", lambda: True)
    hashes = {config_of(checkpoints, draft_int8=rounded).compute_hash() for rounded in (True, False)}
    assert len(hashes) == 2


@pytest.mark.parametrize(("multiplies_bytes", "drafter"), [(False, "eagle"), (True, "eagle3")])
def test_refused_where_it_cannot_be(checkpoints, monkeypatch, multiplies_bytes, drafter):
    monkeypatch.setattr(speculative_config, "multiplies_bytes", lambda: multiplies_bytes)
    with pytest.raises(ValueError, match="draft_int8=true needs .*leave it out"):
        config_of(checkpoints, drafter, draft_int8=True)
    assert config_of(checkpoints, drafter).specplug.draft_int8 is False
