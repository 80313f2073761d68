"""Layers with sliding windows, soft caps, sinks, ALiBi and shared KV caches on the V2 runner: plain vLLM's tokens.

The traits are given to vLLM's attention layers as its models give them; plain decoding runs vLLM's own CPU kernel.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from vllm import LLM
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention

from tests.hosts import conftest as hosts
from tests.hosts.conftest import acceptance_length, runner_of
from tests.v2.conftest import ENGINE, PLAIN, answers, check_control, same
from tests.v2.test_identity import TREE
from vllm_specplug.gpu import attention as paged

PROVEN = True
#: Arguments of vLLM's attention layers.  The window is narrower than the prompts, and ends inside a block.
WINDOW_AND_CAP = {"per_layer_sliding_window": 18, "logits_soft_cap": 1.5}
SINKS_AND_ALIBI = {"sinks": torch.tensor([0.5, 2.0, -1.0, 1.0]), "alibi_slopes": [0.5, 0.25, 0.1, 0.02]}
SHARED = {"kv_sharing_target_layer_name": "model.layers.0.self_attn.attn"}


def start(engine, checkpoints, drafter, arguments, of_layer="", **options):
    """An engine whose attention layers get these arguments too: all, or those whose name begins so."""
    honest = Attention.__init__

    def init(self, *args, prefix="", **kwargs):
        honest(self, *args, prefix=prefix, **{**kwargs, **(arguments if prefix.startswith(of_layer) else {})})

    if drafter is not None:
        options["speculative_config"] = {**hosts.TREE, **TREE, "model": str(checkpoints[drafter])}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Attention, "__init__", init)
        llm = LLM(str(checkpoints["target"]), **{**hosts.ENGINE, **options})
    engine.kept.append(llm)
    return llm


def both(engine, checkpoints, prompts, arguments, of_layer=""):
    """Plain vLLM's answers, and an engine with trees."""
    expected = answers(start(engine, checkpoints, None, arguments, of_layer, **PLAIN), prompts)
    return expected, start(engine, checkpoints, "eagle", arguments, of_layer, **ENGINE)


def change_traits(llm, patch, **changes):
    """The kernels for tree rows see other traits from now on, those for other rows do not."""
    honest = paged.tree_attention

    def wrong(*args, traits, **kwargs):
        honest(*args, traits=replace(traits, **changes), **kwargs)

    patch.setattr(paged, "tree_attention", wrong)


@pytest.fixture(scope="module")
def windowed(engine, checkpoints, prompts):
    return both(engine, checkpoints, prompts, WINDOW_AND_CAP)


@pytest.fixture(scope="module")
def with_sinks(engine, checkpoints, prompts):
    return both(engine, checkpoints, prompts, SINKS_AND_ALIBI)


@pytest.fixture(scope="module")
def shared(engine, checkpoints, prompts):
    return both(engine, checkpoints, prompts, SHARED, of_layer="model.layers.1.")


@pytest.mark.interpreted
@pytest.mark.parametrize("name", ["windowed", "with_sinks", "shared"])
def test_same_tokens(request, prompts, plain, name):
    expected, llm = request.getfixturevalue(name)
    assert not same(expected, plain), "the traits change nothing"
    assert same(answers(llm, prompts), expected)
    assert acceptance_length(llm) > 1.1  # else trees would not have been exercised


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("name, changes", [
    ("windowed", {"window": 17}), ("windowed", {"window": 19}), ("windowed", {"soft_cap": 0.0}),
    ("with_sinks", {"sinks": None}), ("with_sinks", {"alibi_slopes": None}),
])  # fmt: skip
def test_controls(request, prompts, monkeypatch, name, changes):
    """The negative controls: each change must make the identity tests fail."""
    expected, llm = request.getfixturevalue(name)
    change_traits(llm, monkeypatch, **changes)
    check_control(llm, prompts, expected)


def test_control_of_shared_caches(shared, prompts, monkeypatch):
    """The layer's own key/value, which vLLM does not use."""
    expected, llm = shared
    layers = get_layers_from_vllm_config(runner_of(llm).vllm_config, Attention)
    monkeypatch.setattr(layers["model.layers.1.self_attn.attn"].impl, "kv_sharing_target_layer_name", None)
    check_control(llm, prompts, expected)
