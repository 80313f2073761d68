"""KV caches with fewer bits than the model: the answers of the same engine without drafts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.doubles.attention_inputs import make_inputs
from tests.doubles.interpreted import InterpretedImpl
from tests.hosts.conftest import TREE as WHOLE_TREE
from tests.hosts.conftest import acceptance_length
from tests.hosts.test_attention_traits import layers_of
from tests.unit.kernels.test_tree_attention import TOLERANCE
from tests.v2.conftest import ENGINE, GREEDY, answers, same
from tests.v2.test_identity import TREE
from tests.v2.test_kernels import exact, run_attention
from vllm_specplug.core.kv import KvScratch
from vllm_specplug.core.layout import ancestor_bits
from vllm_specplug.core.tree_rows import DeviceTreeRows
from vllm_specplug.cpu.kernels.tree_attention import TOKEN_LAYOUT
from vllm_specplug.gpu import attention as paged
from vllm_specplug.gpu.attention import TreeImpl
from vllm_specplug.gpu.kernels.tiles import CacheScales

PROVEN = True
PLAINLY = GREEDY.clone()
PLAINLY.extra_args = {"speculation": False}
#: By KV head, as some checkpoints give them.
FACTORS = {"_k_scale": torch.tensor([0.21, 0.13]), "_v_scale": torch.tensor([0.4, 0.05])}


def anew(llm, prompts, params=GREEDY):
    llm.reset_prefix_cache()
    return answers(llm, prompts, params)


def start(engine, form):
    return engine(
        "eagle", {**WHOLE_TREE, **TREE}, kv_cache_dtype=form, num_gpu_blocks_override=24, **ENGINE
    )  # all are scaled


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


CONTEXT, WIDTH = 20, 7
TYPES = {"fp8": torch.uint8, "auto": torch.float32, "bfloat16": torch.bfloat16}


def layer_of(form):
    """An attention layer of 4 heads of 32, two of them for keys and values."""
    impl = InterpretedImpl.__new__(InterpretedImpl)
    vars(impl).update(kv_cache_dtype=form, num_heads=4, num_kv_heads=2, head_size=32, scale=32**-0.5, logits_soft_cap=0)
    vars(impl).update(sliding_window=(-1, -1), sinks=None, alibi_slopes=None, kv_sharing_target_layer_name=None)
    factors = {"_q_scale": torch.ones(1), **FACTORS}
    return SimpleNamespace(impl=impl, layer_name="layer", kv_cache_torch_dtype=TYPES[form], **factors)


def chain(scratch):
    """A tree that is a chain, after the context."""
    starts, widths = torch.zeros(1, dtype=torch.int32), torch.tensor([WIDTH], dtype=torch.int32)
    return DeviceTreeRows(
        context_lens=torch.tensor([CONTEXT], dtype=torch.int32),
        query_start=starts,
        query_lens=widths,
        tree_start=starts,
        tree_lens=widths,
        all_rows=True,
        scratch=scratch,
        bits=ancestor_bits(torch.ones(1, WIDTH, WIDTH, dtype=torch.bool).tril()),
        max_query_len=WIDTH,
        max_context_len=CONTEXT,
        uniform=True,
    )


@pytest.mark.interpreted
@pytest.mark.parametrize("form", TYPES)
def test_tree_rows_are_read_like_cached_rows(form, monkeypatch):
    """Rows of a chain get what plain rows get, at verification and in a draft level; rows without rounding do not."""
    layer = layer_of(form)
    impl, pages = layer.impl, torch.zeros(4, 2, 16, 64, dtype=TYPES[form])
    query, key, value = torch.randn(3, CONTEXT + WIDTH, 4, 32, generator=torch.Generator().manual_seed(0))
    key, value, table = key[:, :2], value[:, :2], torch.tensor([[2, 0, 1]], dtype=torch.int32)
    positions = torch.arange(CONTEXT + WIDTH)
    slots = table[0, positions // 16].long() * 16 + positions % 16
    impl.do_kv_cache_update(layer, key, value, pages, slots)
    start, lens = (torch.tensor(n, dtype=torch.int32) for n in ([0, len(query)], [len(query)]))
    plain = SimpleNamespace(tree=None, query_start_loc=start, seq_lens=lens, block_table=table, slot_mapping=slots)
    expected = impl.forward(layer, query, key, value, pages, plain, torch.zeros_like(query))[CONTEXT:]
    tail = [rows[CONTEXT:] for rows in (query, key, value)]
    context = SimpleNamespace(slot_mapping={"layer": slots[CONTEXT:]})
    monkeypatch.setattr(paged, "get_forward_context", lambda: context)

    def attend(scratch=None):
        metadata = SimpleNamespace(tree=chain(scratch), block_table=table, others=None)
        return impl.forward(layer, *tail, pages, metadata, torch.zeros_like(tail[0]))

    torch.testing.assert_close(attend(), expected, rtol=0, atol=1e-5)
    rooms = torch.zeros(2, WIDTH, 2, 32, dtype=TYPES[form])
    torch.testing.assert_close(attend({"layer": KvScratch(*rooms, torch.arange(WIDTH))}), expected, rtol=0, atol=1e-5)
    if form == "fp8":
        not_rounded(monkeypatch)
        assert (attend() - expected).abs().max() > 1e-3


def test_16_bits_of_a_model_of_32(engine, prompts, plain):
    try:
        llm = start(engine, "bfloat16")
    except ValueError as error:
        assert "is incompatible with dtype" in str(error)
        pytest.skip("from 0.33 on vLLM refuses a 16-bit cache of a model in float32")
    expected = anew(llm, prompts, PLAINLY)
    assert not same(expected, plain), "16 bits change nothing"
    assert same(anew(llm, prompts), expected)


def test_third_party_kernels_are_refused(engine):
    llm = start(engine, "fp8")
    layers = layers_of(llm)
    with pytest.raises(ValueError, match="reads no fp8 KV cache: use tree_attention='triton'"):
        paged.use_tree_attention(layers, "flash")


@pytest.mark.parametrize("factors", ["of the layer", "of each head"])
@pytest.mark.parametrize("num_splits", [1, 8])
@pytest.mark.parametrize("eight_bit_queries", [False, True])
def test_attention_over_8_bits(num_splits, factors, eight_bit_queries):
    """Keys and values of pages and of tree rows have 8 bits, on some GPUs queries too."""
    inputs = make_inputs((90, 5), (17, 3), block_size=16, dtype=torch.bfloat16, kv_layout=TOKEN_LAYOUT, garbage=0.0)
    eight = torch.float8_e4m3fn
    rounded = {name: inputs[name].float().to(eight) for name in ("kv_cache", "tree_key", "tree_value")}
    if eight_bit_queries:
        rounded["query"] = inputs["query"].float().to(eight)
    count = 1 if factors == "of the layer" else inputs["kv_cache"].shape[1]
    key, value, query = 2.0 + torch.rand(3, count)
    scales = CacheScales(query if eight_bit_queries else None, key, value)
    output = run_attention({**inputs, **rounded}, num_splits=num_splits, scales=scales)
    group = inputs["query"].shape[1] // inputs["kv_cache"].shape[1]
    by_head = [factor.expand(inputs["kv_cache"].shape[1]).double().unsqueeze(1) for factor in (key, value)]
    wide = {
        name: part.double()
        for name, part in {**inputs, **rounded}.items()
        if torch.is_tensor(part) and part.is_floating_point()
    }
    wide["tree_key"], wide["tree_value"] = wide["tree_key"] * by_head[0], wide["tree_value"] * by_head[1]
    halves = torch.cat([by_head[0].expand(-1, 64), by_head[1].expand(-1, 64)], dim=1)
    wide["kv_cache"] = wide["kv_cache"] * halves.unsqueeze(1)
    if eight_bit_queries:
        wide["query"] = wide["query"] * query.expand(inputs["kv_cache"].shape[1]).repeat_interleave(
            group
        ).double().unsqueeze(1)
    expected = exact({**inputs, **wide, "output": torch.full_like(inputs["output"].double(), float("nan"))})
    written = ~expected.isnan()
    deviation = (output.double() - expected)[written].abs().max() / expected[written].abs().max()
    assert deviation <= 2 * TOLERANCE[torch.bfloat16]
