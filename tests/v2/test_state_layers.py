"""Layers with recurrent states in steps with trees and others, without an engine; vLLM's layers are stand-ins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import MambaSpec

from tests.doubles.tree_states import Forest, conv_step, gated_delta_step, mamba2_step, run_accepted, run_paths
from vllm_specplug.config import ConfigError
from vllm_specplug.gpu.kernels.gated_delta_tree import GatedDeltaWeights
from vllm_specplug.gpu.kernels.mamba2_tree import Mamba2Weights
from vllm_specplug.gpu.runner import TreeRunner
from vllm_specplug.gpu.states import StateLayers

#: Two trees, and after them a prompt of four rows and a single row.
FOREST = Forest([[-1, 0, 0, 1, 1], [-1, 0, 1]], blocks=[2, 4], contexts=[9, 5], starts=[0, 5])
ACCEPTED = [[0, 1, 4], [5, 6]]
SOURCES = torch.tensor([[0, 1, 4, -1], [5, 6, -1, -1], [8, -1, -1, -1], [12, -1, -1, -1]])
NUM_TREE_ROWS, NUM_ROWS, NUM_BLOCKS, NUM_HEADS = 8, 13, 6, 4


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


COMMON = CommonAttentionMetadata(
    query_start_loc=ints(0, 5, 8, 12, 13),
    query_start_loc_cpu=ints(0, 5, 8, 12, 13),
    seq_lens=ints(14, 8, 4, 9),
    seq_lens_cpu_upper_bound=ints(14, 8, 4, 9),
    num_reqs=4,
    num_actual_tokens=NUM_ROWS,
    max_query_len=5,
    max_seq_len=14,
    block_table_tensor=ints(2, 0, 4, 0, 3, 0, 5, 0).view(4, 2),
    slot_mapping=torch.arange(NUM_ROWS),
    is_prefilling=torch.tensor([False, False, True, False]),
)


class Builder:
    """Stands for vLLM's builder."""

    def __init__(self, _spec, layer_names, *_):
        self.layer_names = layer_names

    def build(self, _prefix, common, fast_build=False):
        return common


class Part(SimpleNamespace):
    """Stands for vLLM's group of layers."""

    def __init__(self):
        super().__init__(
            kv_cache_spec=object.__new__(MambaSpec),
            layer_names=["layer"],
            backend=SimpleNamespace(get_builder_cls=lambda: Builder),
        )


def config(**changes: Any) -> Any:
    """What is read of vLLM's configuration."""
    found = {
        "cache_config": SimpleNamespace(mamba_cache_mode="none", use_replayssm=False),
        "kv_transfer_config": None,
        "parallel_config": SimpleNamespace(pipeline_parallel_size=1),
        "mamba_config": SimpleNamespace(enable_stochastic_rounding=False),
    }
    return SimpleNamespace(**{**found, **changes})


def stand_in(module: str, name: str, method: str, **attributes: Any) -> Any:
    """Make a layer of this class of vLLM whose method writes sevens."""

    def compute(self, *given, **named):
        tensors = (*given, *named.values())
        tensors[-1].fill_(7)
        self.seen.append((forward_context.get_forward_context().attn_metadata["layer"], [len(one) for one in tensors]))

    kind = type(name, (), {"__module__": f"vllm.model_executor.layers.mamba.{module}", method: compute})
    layer = kind()
    vars(layer).update(activation="silu", tp_size=1, seen=[], **attributes)
    shapes = [one.shape[1:] for one in layer.kv_cache]
    layer.get_state_shape, layer.get_state_dtype = lambda: shapes, lambda: (torch.float32,) * 2
    return layer


class Projection:
    """Stands for a linear layer of vLLM: ``[size, other size]``."""

    def __init__(self, weight: torch.Tensor):
        self.weight, self.input_size = weight, len(weight)

    def __call__(self, rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        return rows @ self.weight, None


class Case(SimpleNamespace):
    """A layer, its inputs by name (the output last), the inputs of its convolution, and its steps in plain torch."""


def mamba2(draw: Any) -> Case:
    size, state_size, groups = 8, 5, 2
    width = NUM_HEADS * size
    channels = width + 2 * groups * state_size
    layer = stand_in(
        "mamba_mixer2",
        "MambaMixer2",
        "conv_ssm_forward",
        tped_conv_size=channels,
        tped_dt_size=NUM_HEADS,
        tped_intermediate_size=width,
        A=-draw(NUM_HEADS).exp(),
        D=draw(NUM_HEADS),
        dt_bias=draw(NUM_HEADS),
        n_groups=groups,
        conv1d=SimpleNamespace(weight=draw(channels, 1, 4), bias=draw(channels)),
        kv_cache=(draw(NUM_BLOCKS, 3, channels), draw(NUM_BLOCKS, NUM_HEADS, size, state_size)),
    )
    projected = draw(NUM_ROWS, width + channels + NUM_HEADS)
    weights, dt = Mamba2Weights(layer.A, layer.D, layer.dt_bias, groups), projected[:, width + channels :]
    return Case(
        layer=layer,
        tensors={"projected_states": projected, "output": torch.zeros(NUM_ROWS, width)},
        inputs=projected[:, width : width + channels],
        step=lambda rows: mamba2_step(weights, rows, dt, (NUM_HEADS, size, state_size)),
    )


def gated_delta(draw: Any) -> Case:
    keys, key_size, size = 2, 6, 8
    channels = 2 * keys * key_size + NUM_HEADS * size
    layer = stand_in(
        "gdn.qwen_gdn_linear_attn",
        "QwenGatedDeltaNetAttention",
        "_forward_core",
        conv_dim=channels,
        num_v_heads=NUM_HEADS,
        num_k_heads=keys,
        head_v_dim=size,
        A_log=draw(NUM_HEADS),
        dt_bias=draw(NUM_HEADS),
        conv1d=SimpleNamespace(weight=draw(channels, 1, 4), bias=None),
        kv_cache=(draw(NUM_BLOCKS, 3, channels), draw(NUM_BLOCKS, NUM_HEADS, size, key_size)),
    )
    inputs, b, a = draw(NUM_ROWS, channels), draw(NUM_ROWS, NUM_HEADS), draw(NUM_ROWS, NUM_HEADS)
    weights = GatedDeltaWeights(layer.A_log, layer.dt_bias, keys)
    return Case(
        layer=layer,
        tensors={"mixed_qkv": inputs, "b": b, "a": a, "core_attn_out": torch.zeros(NUM_ROWS, NUM_HEADS, size)},
        inputs=inputs,
        step=lambda rows: gated_delta_step(weights, rows, a, b, (NUM_HEADS, size, key_size)),
    )


def rows_of(**changes: Any) -> Any:
    trees = FOREST.on_device("cpu")
    found = {
        "context_lens": trees.context_lens,
        "tree_start": trees.start,
        "tree_lens": trees.lens,
        "bits": trees.bits,
        "max_query_len": trees.max_rows,
        "num_tree_rows": NUM_TREE_ROWS,
        "all_rows": False,
    }
    return SimpleNamespace(**{**found, **changes})


@pytest.fixture
def served(monkeypatch):
    """``served(layer, rows)``: the layer's ``StateLayers`` and its builder, in a forward with these rows."""

    def serve(layer, rows):
        layers, part = StateLayers({"layer": layer}, config(), max_rows=20), Part()
        layers.make_room()
        layers.build_by([[part]], lambda: rows)
        metadata = part.metadata_builders[0].build(0, COMMON, num_accepted_tokens=None)
        context = SimpleNamespace(attn_metadata={"layer": metadata})
        monkeypatch.setattr(forward_context, "_forward_context", context)
        return layers, metadata

    return serve


@pytest.mark.parametrize("kind", [mamba2, gated_delta])
def test_a_step(served, kind):
    """Trees by our kernels, others by vLLM's method on their own rows; the commit moves states and windows."""
    generator = torch.Generator().manual_seed(3)
    case = kind(lambda *shape: torch.randn(*shape, generator=generator))
    layer, (*_, output) = case.layer, case.tensors.values()
    layers, metadata = served(layer, rows_of())
    windows, states = layer.kv_cache[0].mT.clone(), layer.kv_cache[1].clone()
    before = [one.clone() for one in layer.kv_cache]
    convolved, expected = torch.zeros_like(case.inputs).double(), output.flatten(1).double()
    convolve = conv_step(case.inputs, layer.conv1d.weight[:, 0], layer.conv1d.bias, with_silu=True)
    run_paths(FOREST, windows, convolve, convolved)
    run_paths(FOREST, states, case.step(convolved.float()), expected)

    getattr(layer, next(iter(layers._tree_layers.values())).method)(**case.tensors)
    torch.testing.assert_close(output.flatten(1)[:NUM_TREE_ROWS].double(), expected[:NUM_TREE_ROWS], atol=1e-4, rtol=0)
    assert (output[NUM_TREE_ROWS:] == 7).all()
    ((others, lens),) = layer.seen
    assert set(lens) == {NUM_ROWS - NUM_TREE_ROWS} and others is metadata.others
    assert others.query_start_loc.tolist() == [0, 4, 5] and (others.num_actual_tokens, others.max_query_len) == (5, 4)
    assert all(torch.equal(one, kept) for one, kept in zip(layer.kv_cache, before, strict=True))

    run_accepted(FOREST, windows, convolve, ACCEPTED)
    run_accepted(FOREST, states, case.step(convolved.float()), ACCEPTED)
    layers.commit(SOURCES)
    assert torch.equal(layer.kv_cache[0].mT, windows)
    torch.testing.assert_close(layer.kv_cache[1], states, atol=1e-4, rtol=0)
    kept = [one.clone() for one in layer.kv_cache]
    layers.compile_kernels(rows_of())
    assert all(torch.equal(one, before) for one, before in zip(layer.kv_cache, kept, strict=True))


def test_short_convolution(served):
    """Its window is all of its state; the gates lie in the layer."""
    generator, size = torch.Generator().manual_seed(3), 6

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    into, out = draw(size, 3 * size), draw(size, size)
    layer = stand_in(
        "short_conv",
        "ShortConv",
        "forward_native",
        conv=SimpleNamespace(weight=draw(size, 1, 3), bias=draw(size)),
        in_proj=Projection(into),
        out_proj=Projection(out),
        kv_cache=(draw(NUM_BLOCKS, 2, size),),
    )
    layer.get_state_dtype = lambda: (torch.float32,)
    hidden_states, output = draw(NUM_ROWS, size), torch.zeros(NUM_ROWS, size)
    layers, _ = served(layer, rows_of())
    before, after, values = (hidden_states @ into).chunk(3, dim=1)
    windows, convolved = layer.kv_cache[0].mT.clone(), torch.zeros(NUM_ROWS, size).double()
    convolve = conv_step(before * values, layer.conv.weight[:, 0], layer.conv.bias, with_silu=False)
    run_paths(FOREST, windows, convolve, convolved)
    kept = layer.kv_cache[0].clone()

    layer.forward_native(hidden_states=hidden_states, output=output)
    expected = (after * convolved.float()) @ out
    torch.testing.assert_close(output[:NUM_TREE_ROWS], expected[:NUM_TREE_ROWS], atol=1e-4, rtol=0)
    assert (output[NUM_TREE_ROWS:] == 7).all() and torch.equal(layer.kv_cache[0], kept)
    run_accepted(FOREST, windows, convolve, ACCEPTED)
    layers.commit(SOURCES)
    assert torch.equal(layer.kv_cache[0].mT, windows)
    layers.compile_kernels(rows_of())
    assert torch.equal(layer.kv_cache[0].mT, windows)


def test_the_start_says_what_states_cost(served, caplog):
    """A request has one state, so nodes need no cap."""
    caplog.set_level("INFO")
    case = mamba2(lambda *shape: torch.randn(*shape))
    case.layer.get_state_shape = lambda: ((1 << 18,), (1 << 18,))
    served(case.layer, None)
    said = "states take 2.0 MiB per request in 1 layers, whatever the number of nodes; the inputs of up to 20 tree rows"
    assert said in caplog.text


def test_steps_of_other_kinds(served):
    generator = torch.Generator().manual_seed(3)
    layer = mamba2(lambda *shape: torch.randn(*shape, generator=generator)).layer
    _, metadata = served(layer, rows_of(all_rows=True, num_tree_rows=None))
    assert metadata.others is None and metadata.num_tree_rows is None
    assert served(layer, None)[1] is COMMON
    with pytest.raises(RuntimeError, match="prompt rows before a tree"):
        served(layer, rows_of(num_tree_rows=None))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, r"layer a \(SimpleNamespace\) on the V2 model runner"),
        ({"cache_config": SimpleNamespace(mamba_cache_mode="align")}, "prefix caching .*--no-enable-prefix-caching"),
        ({"kv_transfer_config": 1}, "KV connectors .*leave out --kv-transfer-config"),
        ({"parallel_config": SimpleNamespace(pipeline_parallel_size=2)}, "pipeline parallelism"),
    ],
)
def test_what_is_refused(changes, named):
    with pytest.raises(ConfigError, match=named):
        StateLayers({"a": SimpleNamespace()}, config(**changes), max_rows=8)


def test_a_drafter_has_no_states():
    runner = SimpleNamespace(speculator=SimpleNamespace(draft_attn_layer_names={"drafted"}))
    with pytest.raises(ConfigError, match=r"no trees are drafted by layers with a recurrent state \(drafted\)"):
        TreeRunner.use_states(runner, {"layer": None, "drafted": None})
