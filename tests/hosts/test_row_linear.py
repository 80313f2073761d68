"""Linear layers of few rows by our operator: plain decoding's tokens."""

from __future__ import annotations

import pytest
import torch
from vllm import SamplingParams

from tests.hosts.conftest import SEEDED, TREE, acceptance_length, make_prompts, runner_of, token_ids
from vllm_specplug.config import ConfigError

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
#: Rows of one tree; two trees are computed by vLLM's product.
ROWS = {**TREE, "linear_rows": 24}


@pytest.fixture(scope="module")
def prompts():
    return make_prompts(16, seed=3)


def layers_of(llm):
    return [layer for layer in runner_of(llm).model.modules() if hasattr(layer, "cpu_linear")]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("max_num_seqs", [1, 8])
def test_same_as_plain(engine, prompts, params, max_num_seqs):
    expected = token_ids(engine().generate(prompts, params, use_tqdm=False))
    llm = engine("eagle", ROWS, max_num_seqs=max_num_seqs)
    assert token_ids(llm.generate(prompts, params, use_tqdm=False)) == expected
    assert acceptance_length(llm) > 1.2
    layers = layers_of(llm)
    assert len(layers) > 4
    assert all(layer.cpu_linear.__module__ == "vllm_specplug.kernels.row_linear" for layer in layers)


def test_torch_compile(engine, prompts):
    expected = token_ids(engine().generate(prompts, GREEDY, use_tqdm=False))
    llm = engine("eagle", ROWS, enforce_eager=False)
    assert token_ids(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected


def test_bfloat16(engine, prompts):
    """The rounding differs, as between any two products; most first tokens are the same."""
    options = {"dtype": "bfloat16"}
    expected = token_ids(engine(**options).generate(prompts, GREEDY, use_tqdm=False))
    found = token_ids(engine("eagle", ROWS, **options).generate(prompts, GREEDY, use_tqdm=False))
    assert sum(one[0][0] == other[0][0] for one, other in zip(found, expected, strict=True)) > len(prompts) // 2


def test_control_with_other_weights(engine, prompts):
    """The operator reads the weights themselves: vLLM packs its own copy, from which it computes many rows."""
    llm = engine("eagle", ROWS, max_num_seqs=1)
    expected = token_ids(llm.generate(prompts[:4], GREEDY, use_tqdm=False))
    layer = layers_of(llm)[1]
    with torch.inference_mode():
        layer.weight.mul_(-1.0)
    try:
        assert token_ids(llm.generate(prompts[:4], GREEDY, use_tqdm=False)) != expected
    finally:
        with torch.inference_mode():
            layer.weight.mul_(-1.0)
        llm.reset_prefix_cache()


def test_without_it_vllm_computes_all(engine):
    llm = engine("eagle")
    assert not [layer for layer in layers_of(llm) if "row_linear" in layer.cpu_linear.__module__]


def test_not_with_a_drafter_that_is_exchanged(engine):
    with pytest.raises(ConfigError, match=r"linear_rows=24 is for the V1 runner on a CPU.*reload=true.*leave it out"):
        engine("eagle", {**ROWS, "reload": True}, max_num_seqs=2)
