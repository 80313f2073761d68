"""Linear layers by our operator: plain decoding's tokens."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from tests.hosts.conftest import SEEDED, TREE, acceptance_length, answers_of, make_prompts, runner_of
from vllm_specplug.cpu import row_linear
from vllm_specplug.cpu.kernels.row_linear import CODED, RowLinearOnUse, uses_tiles
from vllm_specplug.vllm import speculative_config

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
#: Rows of one tree; two trees are computed by vLLM's product.
ROWS = {**TREE, "linear_rows": 24}
ALL = {**TREE, "linear_rows": "all"}


@pytest.fixture(scope="module")
def prompts():
    return make_prompts(16, seed=3)


def layers_of(llm):
    return [layer for layer in runner_of(llm).model.modules() if hasattr(layer, "cpu_linear")]


def computed_by_us(layer):
    return layer.cpu_linear.__module__ == "vllm_specplug.cpu.kernels.row_linear"


def kept_weights(layer):
    """The operator's copy."""
    names = layer.cpu_linear.__code__.co_freevars
    return dict(zip(names, layer.cpu_linear.__closure__, strict=True))["packed"].cell_contents


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("speculative", [ROWS, ALL], ids=["few", "all"])
def test_same_as_plain(engine, prompts, params, speculative):
    expected = answers_of(engine(), prompts, params)
    llm = engine("eagle", speculative)
    assert answers_of(llm, prompts, params) == expected
    assert acceptance_length(llm) > 1.2
    layers = layers_of(llm)
    assert len(layers) > 4
    assert all(computed_by_us(layer) for layer in layers)
    assert all((layer.packed_weight is None) == (speculative is ALL) for layer in layers)


def test_torch_compile(engine, prompts):
    expected = answers_of(engine(), prompts, GREEDY)
    llm = engine("eagle", ALL, enforce_eager=False)
    assert answers_of(llm, prompts, GREEDY) == expected


def test_bfloat16(engine, prompts):
    """The rounding differs, as between any two products; most first tokens are the same."""
    options = {"dtype": "bfloat16"}
    expected = answers_of(engine(**options), prompts, GREEDY)
    found = answers_of(engine("eagle", ALL, **options), prompts, GREEDY)
    assert sum(one[0][0] == other[0][0] for one, other in zip(found, expected, strict=True)) > len(prompts) // 2


def test_the_type_in_which_weights_are_kept():
    """The smallest that changes none of them; for a new version of a drafter, that of the version in use."""
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    rounded = weight.bfloat16().float()
    for given, dtype, kept, computed in (
        (rounded, None, CODED if uses_tiles(weight.bfloat16()) else torch.bfloat16, rounded),
        (weight, None, torch.float32, weight),
        (weight, torch.bfloat16, torch.bfloat16, rounded),
        (rounded, torch.float32, torch.float32, rounded),
    ):
        layer = torch.nn.Linear(64, 40, bias=False).requires_grad_(False)
        layer.weight.copy_(given)
        with row_linear.row_linear_layers("all", dtype=dtype):
            row_linear.utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
        assert layer.linear_dtype == kept == kept_weights(layer).dtype
        assert layer.weight.numel() == 0
        torch.testing.assert_close(layer.cpu_linear(x, layer.weight, None), x @ computed.T)


@pytest.mark.parametrize("has", [False, True])
def test_by_default_on_x86(engine, monkeypatch, has):
    monkeypatch.setattr(speculative_config, "has_avx2", lambda: has)
    llm = engine("reduced", max_num_seqs=2 + has)  # engines are kept by their options
    layers = [*layers_of(llm), runner_of(llm).drafter._scorer.head]
    assert all(computed_by_us(layer) == has for layer in layers)


@pytest.mark.parametrize("is_tied", [False, True])
def test_embeddings_are_packed_only_to_multiply(engine, checkpoints, tmp_path, prompts, is_tied):
    """A tied LM head shares its copy with the embedding; of another embedding there is none."""
    options = {"max_num_seqs": 1}
    if is_tied:
        folder = shutil.copytree(checkpoints["target"], tmp_path / "tied")
        weights = load_file(folder / "model.safetensors")
        del weights["lm_head.weight"]
        save_file(weights, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
        checkpoints["tied"] = folder
        options["target"] = "tied"
    expected = answers_of(engine(**options), prompts[:4], GREEDY)
    llm = engine("eagle", ALL, **options)
    assert answers_of(llm, prompts[:4], GREEDY) == expected
    target = runner_of(llm).model
    embedding, head = target.model.embed_tokens.cpu_linear, target.lm_head.cpu_linear
    assert isinstance(embedding, RowLinearOnUse) and head.dtype == kept_weights(target.lm_head).dtype
    assert vars(embedding).get("linear") is (head if is_tied else None)


def test_weights_that_are_kept_twice_are_bounded(engine, prompts, monkeypatch):
    expected = answers_of(engine(), prompts, GREEDY)
    monkeypatch.setattr(row_linear, "MOST_KEPT_TWICE", 1 << 16)
    llm = engine("eagle", ROWS, max_num_seqs=4)
    ours = [computed_by_us(layer) for layer in layers_of(llm)]
    assert any(ours) and not all(ours)
    assert answers_of(llm, prompts, GREEDY) == expected
