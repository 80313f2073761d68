"""KV caches of 8 bits on a CPU: the tree attention op against its reference, and rounding against vLLM's own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.doubles.attention_inputs import attend_causally, make_inputs
from tests.unit.kernels.test_tree_attention import (
    LAYOUTS,
    TRAITS,
    assert_written,
    backend,  # noqa: F401
    deviation,
    exact,
    one_thread,  # noqa: F401
    prompt_inputs,
    requires_operators,
    tree_attention,
    vllm_ops,  # noqa: F401
)
from vllm_specplug.core.attention_traits import NO_TRAITS
from vllm_specplug.cpu.kernels import tree_attention as kernels
from vllm_specplug.cpu.kernels.tree_attention import unpack_pages

FORMATS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SCALES = {"scale": 0.37 / 8, "value_scale": 1.7}
#: Relative to the largest output; those of 16 bits are rounded once.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
EIGHT_BITS = pytest.mark.parametrize("form", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])


def rounded(inputs, form):
    """The same arguments with a cache of 8 bits; every tree row lies in a wider row, as vLLM's do."""
    made = {**inputs, "kv_cache": inputs["kv_cache"].float().to(form)}
    for name in ("tree_key", "tree_value"):
        if name in inputs:
            wide = torch.zeros(*inputs[name].shape[:2], 2 * inputs[name].shape[2])
            wide[..., : inputs[name].shape[2]] = inputs[name]
            made[name] = wide.to(form)[..., : inputs[name].shape[2]]
    return {**made, **SCALES}


@EIGHT_BITS
@pytest.mark.parametrize("name", ["nothing", "window of some context", "all"])
@pytest.mark.parametrize("block_size", [32, 128])
@pytest.mark.parametrize("kv_layout, dtype", LAYOUTS)
def test_like_the_reference(backend, kv_layout, dtype, block_size, name, form):  # noqa: F811
    inputs = make_inputs((5, 300, 0, 129), (17, 3, 8, 40), block_size=block_size, dtype=dtype, kv_layout=kv_layout)
    inputs, traits = rounded(inputs, form), TRAITS.get(name, NO_TRAITS)
    backend(**inputs, traits=traits)
    assert deviation(inputs["output"], exact(inputs, traits)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("kv_layout", ["vec", "amx"])
@EIGHT_BITS
def test_every_number_is_read(form, kv_layout):
    """A query sees one key: the output is its value."""
    requires_operators()
    numbers = torch.arange(256, dtype=torch.uint8).view(form)
    numbers = torch.where(numbers.float().isfinite(), numbers.float(), 0.0)
    inputs = make_inputs(
        (1,), (1,), num_heads=1, num_kv_heads=1, head_size=256, dtype=torch.bfloat16, kv_layout=kv_layout
    )
    inputs["mask"][:] = False
    inputs["kv_cache"] = kernels.pack_pages(*numbers.expand(2, 2, 1, 128, 256), kv_layout).to(form)
    tree_attention(**rounded(inputs, form) | {"value_scale": 1.0})
    assert torch.equal(inputs["output"][int(inputs["query_start"][0]), 0].float(), numbers)


@EIGHT_BITS
@pytest.mark.parametrize("name", ["nothing", "all"])
@pytest.mark.parametrize("kv_layout, dtype", LAYOUTS)
def test_keys_in_pages_and_in_tree_rows_give_the_same_bits(kv_layout, dtype, name, form):
    requires_operators()
    inputs, as_trees = prompt_inputs(kv_layout=kv_layout, dtype=dtype, garbage=0.0)
    inputs, as_trees = rounded(inputs, form), rounded(as_trees, form)
    attend_causally(**inputs, traits=TRAITS.get(name, NO_TRAITS))
    tree_attention(**as_trees, traits=TRAITS.get(name, NO_TRAITS))
    assert torch.equal(inputs["output"], as_trees["output"])


def test_tree_rows_are_kept(backend):  # noqa: F811
    inputs = rounded(make_inputs((40, 7), (9, 3)), torch.float8_e5m2)
    kept = torch.zeros(2, *inputs["tree_key"].shape, dtype=torch.uint8)
    backend(**inputs, kept=kept.view(torch.float8_e5m2))
    assert torch.equal(kept, torch.stack([inputs["tree_key"], inputs["tree_value"]]).view(torch.uint8))


@pytest.mark.parametrize("kv_layout", ["vec", "amx"])
@pytest.mark.parametrize("name", ["write_rows", "write_rows_reference"])
def test_rows_are_written_to_their_slots(name, kv_layout):
    assert_written(getattr(kernels, name), kv_layout, torch.uint8)


@pytest.mark.parametrize("value", [1.0, 0.37])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("isa, dtype", LAYOUTS)
def test_tree_rows_are_rounded_as_vllm_rounds_cached_rows(vllm_ops, isa, dtype, name, value):  # noqa: F811
    """The same bytes, those of numbers beyond the format's range too."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("vLLM's fp8 caches need AVX-512")
    from vllm_specplug.cpu.attention import FP8, TreeAttentionImpl

    impl = TreeAttentionImpl.__new__(TreeAttentionImpl)
    impl.kv_cache_dtype, impl.head_size = name, 64
    layer = SimpleNamespace(_k_scale_float=value, _v_scale_float=3 * value)
    fused = torch.randn(64, 9, 64) * 10.0 ** torch.randint(-4, 6, (64, 1, 1))
    key, value_ = fused.to(dtype).nan_to_num()[:, 3:].split(3, dim=1)
    cache = torch.zeros(2, 3, 32, 128, dtype=torch.uint8)
    layer.isa = isa
    impl.attn_type = "decoder"
    impl.do_kv_cache_update(layer, key, value_, cache, torch.arange(64))
    for ours, theirs in zip(impl.as_stored(layer, key, value_), unpack_pages(cache, isa), strict=True):
        assert torch.equal(ours, theirs.transpose(0, 1))
    assert FP8 == FORMATS
    assert impl.numbers(cache).dtype == FORMATS[name]
