"""The tree attention op against its reference in float64, vLLM's page layouts and vLLM's chain attention."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.doubles.attention_by_position import attention_by_position
from tests.doubles.attention_inputs import attend, attend_causally, make_inputs
from tests.host_versions import TAKES_FLOAT32_SINKS
from vllm_specplug.core.attention_traits import NO_TRAITS, AttentionTraits
from vllm_specplug.core.tree_rows import KvPages
from vllm_specplug.cpu.kernels import cpu_ops
from vllm_specplug.cpu.kernels import tree_attention as kernels
from vllm_specplug.cpu.kernels.tree_attention import pack_pages, unpack_pages

#: Largest deviation allowed, relative to the largest output.  Outputs of 16 bits are rounded once, to 2^-9 or 2^-12.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
#: Sizes as DeepSeek's, and small ones.
LATENTS = [{"head_size": 576, "value_size": 512}, {"head_size": 48, "value_size": 32}]
LAYOUTS = [("vec", torch.float32), ("vec", torch.bfloat16), ("amx", torch.bfloat16), ("vec", torch.float16)]
BACKENDS = {
    "cpp": partial(attend, kernels.tree_attention),
    "torch": partial(attend, kernels.tree_attention_reference),
}
tree_attention = BACKENDS["cpp"]


@pytest.fixture(autouse=True)
def one_thread():
    """Threads of tiny ops spend their time waiting for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["cpp", "torch"])
def backend(request):
    if request.param == "cpp" and kernels.select_backend() != "cpp":
        pytest.skip("the C++ op cannot be built here")
    return BACKENDS[request.param]


def exact(inputs, traits=NO_TRAITS):
    """The reference's output in float64 arithmetic."""
    wide = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()}
    wide["output"] = torch.full_like(wide["output"], float("nan"))
    attend(kernels.tree_attention_reference, **wide, traits=traits)
    return wide["output"]


def deviation(output, expected):
    """The largest, relative to the largest output."""
    written = ~expected.isnan()
    assert written.any()
    assert torch.equal(written, ~output.isnan()), "rows named by no request were written, or garbage leaked"
    return (output.double() - expected)[written].abs().max() / expected[written].abs().max()


def assert_matches(inputs, backend, traits=NO_TRAITS):
    backend(**inputs, traits=traits)
    assert deviation(inputs["output"], exact(inputs, traits)) <= TOLERANCE[inputs["query"].dtype]


@pytest.mark.parametrize("context", [0, 1, 31, 32, 100, 1000])
@pytest.mark.parametrize("block_size", [32, 128])
@pytest.mark.parametrize("kv_layout, dtype", LAYOUTS)
def test_context_lengths(backend, kv_layout, dtype, block_size, context):
    inputs = make_inputs((context,), (17,), block_size=block_size, dtype=dtype, kv_layout=kv_layout)
    assert not inputs["query"].is_contiguous() and not inputs["tree_key"].is_contiguous()
    assert_matches(inputs, backend)


@pytest.mark.parametrize("head_size", [16, 32, 64, 80, 112, 128, 160, 256, 512])
@pytest.mark.parametrize("kv_layout, dtype", LAYOUTS)
def test_head_sizes(backend, kv_layout, dtype, head_size):
    assert_matches(make_inputs((150,), (10,), head_size=head_size, dtype=dtype, kv_layout=kv_layout), backend)


@pytest.mark.parametrize("num_heads, num_kv_heads", [(4, 4), (9, 3), (8, 1), (7, 1), (32, 2)])
@pytest.mark.parametrize("kv_layout, dtype", LAYOUTS)
def test_head_counts(backend, kv_layout, dtype, num_heads, num_kv_heads):
    inputs = make_inputs((70,), (9,), num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=dtype, kv_layout=kv_layout)
    assert_matches(inputs, backend)


@pytest.mark.parametrize("block_size", [16, 48, 96, 128])
@pytest.mark.parametrize("kv_layout, dtype", LAYOUTS)
def test_batch_of_different_lengths(backend, kv_layout, dtype, block_size):
    inputs = make_inputs(
        (5, 300, 0, 129, 64), (17, 3, 1, 0, 61), block_size=block_size, dtype=dtype, kv_layout=kv_layout
    )
    assert_matches(inputs, backend)


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_do_not_change_the_output(threads):
    single, several = (make_inputs((5, 300, 0, 129), (17, 3, 1, 61), garbage=0.0) for _ in range(2))
    tree_attention(**single)
    torch.set_num_threads(threads)
    tree_attention(**several)
    torch.testing.assert_close(single["output"], several["output"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("rows, nodes", [(1, 1), (8, 1), (8, 60), (61, 61), (10, 130), (200, 300), (4, 0)])
@pytest.mark.parametrize("kv_layout, dtype", LAYOUTS)
def test_tree_lengths(backend, kv_layout, dtype, rows, nodes):
    """Query and tree rows differ in number at a drafter's levels; trees may be wider than a chunk of keys."""
    inputs = make_inputs((40, 7), (rows, 2), tree_lens=(nodes, 3), dtype=dtype, kv_layout=kv_layout)
    assert_matches(inputs, backend)


@pytest.mark.parametrize("context", [0, 40])
def test_padding_rows_see_the_context_only(backend, context):
    inputs = make_inputs((context,), (8,))
    inputs["mask"][0, 5:] = False
    assert_matches(inputs, backend)
    if context == 0:
        assert not inputs["output"][inputs["query_start"][0] + 5 :][:3].any()


def test_large_scores_do_not_overflow(backend):
    inputs = make_inputs((200,), (12,), num_heads=3)
    inputs["scale"] = 40.0
    backend(**inputs)
    expected = exact(inputs)
    written = ~expected.isnan()
    # Scores in the thousands: a rounding error of the score is an error of the exponent.
    torch.testing.assert_close(inputs["output"].double()[written], expected[written], rtol=0, atol=5e-3)


#: One number for each of 9 heads; bfloat16 holds them without loss.
HEADS = torch.linspace(-1.0, 3.0, 9)
TRAITS = {
    "window of one key": AttentionTraits(window=1),
    "window within the tree": AttentionTraits(window=3),
    "window of some context": AttentionTraits(window=40),
    "window of more than a page": AttentionTraits(window=170),
    "window of more than all": AttentionTraits(window=10_000),
    "chunks within the tree": AttentionTraits(local=3),
    "chunks of some context": AttentionTraits(local=50),
    "chunks of more than a page": AttentionTraits(local=170),
    "chunks of more than all": AttentionTraits(local=10_000),
    "soft cap": AttentionTraits(soft_cap=0.7),
    "sinks": AttentionTraits(sinks=HEADS),
    "ALiBi": AttentionTraits(alibi_slopes=0.5 ** (HEADS + 2)),
    "window and sinks": AttentionTraits(window=40, sinks=HEADS),
    "all": AttentionTraits(window=130, soft_cap=2.0, sinks=HEADS, alibi_slopes=0.5 ** (HEADS + 5)),
}


def tree_inputs(**changes):
    """Requests of many page places; the trees are deeper than the small windows."""
    return make_inputs((5, 300, 0, 129, 200), (17, 3, 8, 40, 12), **changes)


@pytest.mark.parametrize("name", TRAITS)
def test_the_reference_is_attention_by_position(name):
    inputs = tree_inputs()
    assert max(inputs["mask"].sum(2).flatten()) > 5
    expected = attention_by_position(inputs, TRAITS[name])
    assert deviation(exact(inputs, TRAITS[name]), expected) <= 1e-12


@pytest.mark.parametrize("block_size", [32, 128])
@pytest.mark.parametrize("name", TRAITS)
@pytest.mark.parametrize("kv_layout, dtype", LAYOUTS)
def test_traits(backend, kv_layout, dtype, name, block_size):
    assert_matches(tree_inputs(block_size=block_size, dtype=dtype, kv_layout=kv_layout), backend, TRAITS[name])


@pytest.mark.parametrize("num_kv_heads", [9, 3, 1])
@pytest.mark.parametrize("name", TRAITS)
def test_traits_of_grouped_heads_and_wide_trees(backend, name, num_kv_heads):
    """Trees wider than a chunk of keys, and requests split into several units of rows."""
    inputs = make_inputs((250, 31), (150, 200), num_kv_heads=num_kv_heads, head_size=16)
    assert_matches(inputs, backend, TRAITS[name])


@pytest.mark.parametrize("name", TRAITS)
def test_traits_at_draft_levels(backend, name):
    """A level's rows see ancestors among the rows of earlier levels; a padding row sees the context only."""
    inputs = make_inputs((140, 7), (8, 2), tree_lens=(60, 9))
    inputs["mask"][0, 6:] = False
    assert_matches(inputs, backend, TRAITS[name])


@pytest.mark.parametrize("block_size", [32, 128])
@pytest.mark.parametrize("context", [30, 500, 1000, 1020])
@pytest.mark.parametrize("kind", ["window", "local"])
def test_pages_before_the_window_are_not_read(context, block_size, kind):
    """vLLM frees them, and may give them to other requests."""
    if kernels.select_backend() != "cpp":
        pytest.skip("the C++ op cannot be built here")
    inputs, traits = make_inputs((context,), (17,), block_size=block_size), AttentionTraits(**{kind: 100})
    expected = exact(inputs, traits)
    seen = context + 1 - 100 if kind == "window" else context // 100 * 100  # by the root, from this position on
    freed = max(0, seen) // block_size
    inputs["kv_cache"][inputs["block_table"][0, :freed].long()] = float("nan")
    tree_attention(**inputs, traits=traits)
    assert deviation(inputs["output"], expected) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("backend_name", ["cpp", "torch"])
def test_unknown_layout_is_refused(backend_name):
    inputs = make_inputs()
    inputs["kv_layout"] = "neon"
    with pytest.raises(ValueError, match="valid: vec, vec16, amx, latent"):
        BACKENDS[backend_name](**inputs)


@pytest.mark.parametrize(
    "name, value",
    [
        ("context_lens", torch.tensor([100_000], dtype=torch.int32)),
        ("block_table", torch.tensor([[99]], dtype=torch.int32)),
        ("query_lens", torch.tensor([18], dtype=torch.int32)),
        ("tree_start", torch.tensor([1000], dtype=torch.int32)),
        ("context_lens", torch.tensor([100])),
        ("tree_key", torch.zeros(18, 3, 64, dtype=torch.bfloat16)),
        ("traits", AttentionTraits(sinks=HEADS[:3])),
        ("traits", AttentionTraits(alibi_slopes=HEADS.bfloat16())),
        ("traits", AttentionTraits(window=-1)),
        ("traits", AttentionTraits(window=8, local=8)),
        ("output", torch.zeros(19, 9, 48)),
        ("kv_layout", "latent"),
    ],
)
def test_wrong_arguments_are_refused(name, value):
    if kernels.select_backend() != "cpp":
        pytest.skip("the C++ op cannot be built here")
    inputs = make_inputs()
    inputs[name] = value
    with pytest.raises(RuntimeError, match="tree_attention: "):
        tree_attention(**inputs)


@pytest.mark.parametrize("kv_layout", ["vec", "vec16", "amx"])
def test_pack_and_unpack_are_inverse(kv_layout):
    key, value = torch.randn(2, 3, 2, 32, 48)
    unpacked_key, unpacked_value = unpack_pages(pack_pages(key, value, kv_layout), kv_layout)
    assert torch.equal(unpacked_key, key.transpose(0, 1).flatten(1, 2))
    assert torch.equal(unpacked_value, value.transpose(0, 1).flatten(1, 2))


def assert_written(write, kv_layout, dtype, block_size=32, num_layers=3):
    """Rows of three layers in slots of three pages: they are there, and nothing else has changed."""
    g = torch.Generator().manual_seed(0)
    kept = torch.randn(num_layers, 2, 9, 2, 48, generator=g).to(dtype)
    before = [torch.randn(2, 3, 2, block_size, 48, generator=g).to(dtype) for _ in range(num_layers)]
    caches = [pack_pages(key, value, kv_layout).contiguous() for key, value in before]
    rows, slots = torch.tensor([4, 0, 8, 3]), torch.tensor([block_size + 17, block_size + 16, 5, 3 * block_size - 1])
    write(kept, caches, kv_layout, rows, slots)
    for news, olds, cache in zip(kept, before, caches, strict=True):
        for new, old, written in zip(news, olds, unpack_pages(cache, kv_layout), strict=True):
            expected = old.transpose(0, 1).flatten(1, 2).clone()
            expected[:, slots] = new[rows].transpose(0, 1)
            assert torch.equal(written, expected)


@pytest.mark.parametrize("kv_layout, dtype", LAYOUTS)
@pytest.mark.parametrize("name", ["write_rows", "write_rows_reference"])
def test_rows_are_written_to_their_slots(name, kv_layout, dtype):
    assert_written(getattr(kernels, name), kv_layout, dtype)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": torch.tensor([9])},
        {"rows": torch.tensor([-1])},
        {"slots": torch.tensor([64])},
        {"slots": torch.tensor([1], dtype=torch.int32)},
        {"slots": torch.tensor([1, 2])},
        {"kept": torch.zeros(1, 2, 9, 2, 16, dtype=torch.bfloat16)},
        {"kept": torch.zeros(1, 2, 9, 3, 16)},
        {"kept": torch.zeros(2, 2, 9, 2, 16)},
        {"kv_layout": "amx"},
    ],
)
def test_rows_that_do_not_fit_are_refused(change):
    if kernels.select_backend() != "cpp":
        pytest.skip("the C++ op cannot be built here")
    given = dict(rows=torch.tensor([0]), slots=torch.tensor([0]), kv_layout="vec", kept=torch.zeros(1, 2, 9, 2, 16))
    with pytest.raises(RuntimeError, match="write_rows: "):
        kernels.write_rows(**{"kv_caches": [torch.zeros(2, 2, 32, 32)]} | given | change)


@pytest.mark.parametrize("kv_layout, dtype", LAYOUTS)
def test_tree_rows_are_kept(backend, kv_layout, dtype):
    inputs = make_inputs((40, 7), (9, 3), dtype=dtype, kv_layout=kv_layout)
    key, value = inputs["tree_key"], inputs["tree_value"]
    kept = torch.zeros(2, *key.shape, dtype=dtype)
    backend(**inputs, kept=kept)
    assert torch.equal(kept, torch.stack([key, value]))
    if backend is tree_attention:
        with pytest.raises(RuntimeError, match="tree_attention: kept"):
            backend(**inputs, kept=kept[:, 1:])


def latent_inputs(dtype, context_lens=(5, 300, 0, 129), query_lens=(17, 3, 8, 40), **changes):
    """Eight heads are more rows than read values of 16 bits in place, two are fewer."""
    sizes = {"num_heads": 8, "num_kv_heads": 1, "kv_layout": "latent", **LATENTS[1]}
    return make_inputs(context_lens, query_lens, dtype=dtype, **{**sizes, **changes})


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("block_size, num_heads", [(16, 8), (128, 8), (32, 2)])
@pytest.mark.parametrize("sizes", LATENTS)
def test_latents(backend, dtype, block_size, num_heads, sizes):
    inputs = latent_inputs(dtype, block_size=block_size, num_heads=num_heads, **sizes)
    kept = inputs["tree_key"].new_zeros(1, *inputs["tree_key"].shape)
    backend(**inputs, kept=kept)
    assert deviation(inputs["output"], exact(inputs)) <= TOLERANCE[dtype]
    assert torch.equal(kept[0], inputs["tree_key"])


def test_latents_by_position():
    inputs = latent_inputs(torch.float32)
    assert deviation(exact(inputs), attention_by_position(inputs)) <= 1e-12


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("sizes", LATENTS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_latents_of_accepted_rows_are_read_from_the_pages_alike(dtype, sizes, block_size):
    """The rows of a chain, committed one by one, then attend as plain rows: with the same bits."""
    if kernels.select_backend() != "cpp":
        pytest.skip("the C++ op cannot be built here")
    inputs = latent_inputs(dtype, (112,), (25,), block_size=block_size, causal=True, garbage=0.0, **sizes)
    tree_attention(**inputs)
    cache = torch.cat([inputs["kv_cache"], inputs["kv_cache"].new_zeros(2, *inputs["kv_cache"].shape[1:])])
    new = torch.arange(len(inputs["kv_cache"]), len(cache), dtype=torch.int32)
    table = torch.cat([inputs["block_table"], new[None]], dim=1)
    positions = torch.arange(112, 137)
    slots = table[0, positions // block_size].long() * block_size + positions % block_size
    kept = inputs["tree_key"].unsqueeze(1)[None, None, :, 0].contiguous()
    kernels.write_rows(kept, [cache], "latent", positions - 112 + int(inputs["tree_start"][0]), slots)
    for row in (0, 7, 15, 16, 24):
        query = inputs["query"][inputs["query_start"][0] + row][None]
        output = query.new_zeros(1, 8, sizes["value_size"])
        rows = kernels.PlainRows(*torch.tensor([[113 + row], [0], [1]], dtype=torch.int32))
        kernels.causal_attention(query, output, KvPages(cache, table, "latent"), rows, inputs["scale"])
        assert torch.equal(output[0], inputs["output"][inputs["query_start"][0] + row])


@pytest.mark.parametrize("name", ["write_rows", "write_rows_reference"])
def test_latents_are_written_to_their_slots(name):
    kept, caches = torch.randn(2, 1, 9, 1, 48), [torch.randn(3, 1, 32, 48) for _ in range(2)]
    before = [cache.clone() for cache in caches]
    rows, slots = torch.tensor([4, 0, 8]), torch.tensor([49, 5, 95])
    getattr(kernels, name)(kept, caches, "latent", rows, slots)
    for new, old, cache in zip(kept, before, caches, strict=True):
        old.view(-1, 48)[slots] = new[0, rows, 0]
        assert torch.equal(cache, old)


def test_fallback_is_announced_once(monkeypatch, caplog):
    def fail():
        raise RuntimeError("no compiler\nlong story")

    monkeypatch.setattr(cpu_ops, "_load", fail)
    cpu_ops.operators.cache_clear()
    try:
        with caplog.at_level("INFO", logger="vllm_specplug"):
            assert kernels.select_backend() == kernels.select_backend() == "torch"
            assert_matches(make_inputs(), tree_attention)
            assert_written(kernels.write_rows, "vec", torch.float32)
    finally:
        cpu_ops.operators.cache_clear()
    messages = [r.getMessage() for r in caplog.records if r.name == "vllm_specplug"]
    assert len(messages) == 1 and "no compiler" in messages[0]


@pytest.fixture
def vllm_ops():
    ops = pytest.importorskip("vllm._custom_ops")
    if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        pytest.skip("this vLLM has no CPU attention")
    return ops


def vllm_write(ops, cache, key, value, slots, isa):
    """Writes ``[num_tokens, num_kv_heads, head_size]`` keys and values to the slots; returns vLLM's cache views."""
    num_blocks, num_kv_heads, block_size, _ = cache.shape
    key_cache, value_cache = cache.view(num_blocks, num_kv_heads, 2 * block_size, -1).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa, 1.0, 1.0, "auto")
    return key_cache, value_cache


def vllm_chain_attention(ops, inputs, isa, traits=NO_TRAITS):
    """vLLM's causal attention of one request, with the tree rows cached after the context as a chain.

    Returns:
        A function that runs vLLM's kernel and returns its output, ``[query_len, num_heads, head_size]``.
    """
    context, start, rows = (int(inputs[k][0]) for k in ("context_lens", "query_start", "query_lens"))
    num_blocks, num_kv_heads, block_size, width = inputs["kv_cache"].shape
    old, new = -(-context // block_size), -(-rows // block_size) + 1
    pages = [*inputs["block_table"][0, :old].tolist(), *range(num_blocks, num_blocks + new)]
    table = torch.tensor([pages], dtype=torch.int32)
    cache = torch.cat([inputs["kv_cache"], inputs["kv_cache"].new_zeros(new, *inputs["kv_cache"].shape[1:])])
    positions = torch.arange(context, context + rows)
    slots = table[0, positions // block_size].long() * block_size + positions % block_size
    chain = slice(int(inputs["tree_start"][0]), int(inputs["tree_start"][0]) + rows)
    key_cache, value_cache = vllm_write(
        ops, cache.nan_to_num(0), inputs["tree_key"][chain], inputs["tree_value"][chain], slots, isa
    )
    query = inputs["query"][start : start + rows]
    output = torch.zeros_like(query, memory_format=torch.contiguous_format)
    shared = dict(
        query_start_loc=torch.tensor([0, rows], dtype=torch.int32),
        seq_lens=torch.tensor([context + rows], dtype=torch.int32),
        causal=True,
    )
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1,
        num_heads=query.shape[1],
        num_kv_heads=num_kv_heads,
        head_dim=width // 2,
        dtype=query.dtype,
        sliding_window_size=traits.window or -1,
        isa=isa,
        enable_kv_split=True,
        **shared,
    )
    sinks = traits.sinks
    if sinks is not None and not TAKES_FLOAT32_SINKS:
        sinks = sinks.bfloat16()  # without loss: see HEADS

    def run():
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=key_cache,
            value_cache=value_cache,
            output=output,
            scale=inputs["scale"],
            alibi_slopes=traits.alibi_slopes,
            sliding_window=traits.window or -1,
            block_table=table,
            softcap=traits.soft_cap,
            scheduler_metadata=metadata,
            s_aux=sinks,
            **shared,
        )
        return output

    return run


@pytest.mark.parametrize("block_size, head_size", [(32, 128), (128, 64), (64, 96)])
@pytest.mark.parametrize("isa, dtype", [*LAYOUTS, *(("vec16", dtype) for dtype in TOLERANCE)])
def test_vllm_writes_this_page_layout(vllm_ops, isa, dtype, block_size, head_size):
    if isa == "amx" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("vLLM's operators for a CPU without AVX-512 do not have this layout")
    key, value = torch.randn(2, 2 * block_size, 3, head_size).to(dtype)
    cache = torch.zeros(3, 3, block_size, 2 * head_size, dtype=dtype)
    vllm_write(vllm_ops, cache, key, value, torch.arange(block_size, 3 * block_size), isa)
    unpacked_key, unpacked_value = unpack_pages(cache[1:], isa)
    assert torch.equal(unpacked_key, key.transpose(0, 1))
    assert torch.equal(unpacked_value, value.transpose(0, 1))


@pytest.mark.parametrize("rows, context", [(1, 100), (17, 0), (17, 100), (61, 1000), (33, 127)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_chain_mask_gives_the_output_of_vllm(backend, vllm_ops, dtype, rows, context):
    inputs = make_inputs((context,), (rows,), dtype=dtype, causal=True)
    assert chain_deviation(vllm_ops, inputs, backend) <= 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("name", [name for name in TRAITS if not TRAITS[name].local])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_traits_mean_what_they_mean_in_vllm(backend, vllm_ops, dtype, name):
    inputs = make_inputs((200,), (17,), dtype=dtype, causal=True)
    assert chain_deviation(vllm_ops, inputs, backend, TRAITS[name]) <= 2 * TOLERANCE[dtype]


def chain_deviation(ops, inputs, backend, traits=NO_TRAITS):
    backend(**inputs, traits=traits)
    output = inputs["output"][int(inputs["query_start"][0]) :][: int(inputs["query_lens"][0])]
    expected = vllm_chain_attention(ops, inputs, "vec", traits)()
    return (output - expected).abs().max() / expected.abs().max()


# ---- prompts


def prompt_inputs(seq_lens=(5, 300, 129, 64, 700), query_lens=(5, 200, 0, 1, 333), **changes):
    """Arguments of ``causal_attention``, and the same as trees: chains after a context, their keys from the pages."""
    made = make_inputs(seq_lens, query_lens, tree_lens=query_lens, causal=True, **changes)
    names = ("query", "output", "kv_cache", "kv_layout", "block_table", "query_start", "query_lens", "scale")
    as_trees = dict(made, **{name: made[name].clone() for name in ("tree_key", "tree_value", "output")})
    as_trees["context_lens"] = made["context_lens"] - made["query_lens"]
    for request, (total, rows) in enumerate(zip(seq_lens, query_lens, strict=True)):
        pages = made["kv_cache"][made["block_table"][request, : -(-total // made["kv_cache"].shape[2])].long()]
        first = int(made["tree_start"][request])
        for name, kept in zip(("tree_key", "tree_value"), unpack_pages(pages, made["kv_layout"]), strict=True):
            as_trees[name][first : first + rows] = kept[:, total - rows : total].transpose(0, 1)
    return {**{name: made[name] for name in names}, "seq_lens": made["context_lens"]}, as_trees


def assert_prompts_match(traits=NO_TRAITS, **changes):
    if kernels.select_backend() != "cpp":
        pytest.skip("the C++ op cannot be built here")
    inputs, as_trees = prompt_inputs(**changes)
    attend_causally(**inputs, traits=traits)
    assert deviation(inputs["output"], exact(as_trees, traits)) <= TOLERANCE[inputs["query"].dtype]


@pytest.mark.parametrize("block_size", [16, 48, 128])
@pytest.mark.parametrize("kv_layout, dtype", LAYOUTS)
def test_prompts(kv_layout, dtype, block_size):
    assert_prompts_match(kv_layout=kv_layout, dtype=dtype, block_size=block_size)


@pytest.mark.parametrize("name", TRAITS)
@pytest.mark.parametrize("kv_layout, dtype", LAYOUTS)
def test_traits_in_prompts(kv_layout, dtype, name):
    lens = {"seq_lens": (5, 300, 129), "query_lens": (5, 70, 1)}
    assert_prompts_match(TRAITS[name], kv_layout=kv_layout, dtype=dtype, **lens)


@pytest.mark.parametrize("num_heads, num_kv_heads, head_size", [(4, 4, 80), (9, 1, 16), (7, 7, 128)])
def test_heads_in_prompts(num_heads, num_kv_heads, head_size):
    assert_prompts_match(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, dtype=torch.bfloat16)


@pytest.mark.parametrize("threads", [2, 5])
def test_prompts_in_several_threads(threads):
    torch.set_num_threads(threads)
    assert_prompts_match(dtype=torch.bfloat16)


def test_more_queries_than_tokens_are_refused():
    if kernels.select_backend() != "cpp":
        pytest.skip("the C++ op cannot be built here")
    inputs, _ = prompt_inputs((5,), (5,))
    inputs["query_lens"] += 1
    with pytest.raises(RuntimeError, match="query rows out of range"):
        attend_causally(**inputs)


# ---- the same bits however a row is computed


def requires_operators():
    if kernels.select_backend() != "cpp":
        pytest.skip("the C++ op cannot be built here")


@pytest.mark.parametrize("name", ["nothing", *TRAITS])
@pytest.mark.parametrize("kv_layout, dtype", LAYOUTS)
def test_keys_in_pages_and_in_tree_rows_give_the_same_bits(kv_layout, dtype, name):
    requires_operators()
    traits = TRAITS.get(name, NO_TRAITS)
    inputs, as_trees = prompt_inputs(kv_layout=kv_layout, dtype=dtype, garbage=0.0)
    attend_causally(**inputs, traits=traits)
    tree_attention(**as_trees, traits=traits)
    assert torch.equal(inputs["output"], as_trees["output"])


#: What layers add, and KV heads of 9 query heads: with 9, a row alone is the only one of its tile.
BITS = [*((name, 3) for name in ("nothing", *TRAITS)), ("nothing", 9)]


@pytest.mark.parametrize("name, num_kv_heads", BITS)
@pytest.mark.parametrize("block_size", [16, 48, 128])
@pytest.mark.parametrize("kv_layout, dtype", LAYOUTS)
def test_a_row_alone_has_the_bits_that_it_has_in_a_prompt(kv_layout, dtype, block_size, name, num_kv_heads):
    requires_operators()
    traits, shape = TRAITS.get(name, NO_TRAITS), {"block_size": block_size, "num_kv_heads": num_kv_heads}
    inputs, _ = prompt_inputs((300,), (300,), kv_layout=kv_layout, dtype=dtype, garbage=0.0, **shape)
    attend_causally(**inputs, traits=traits)
    for position in (0, 5, 127, 128, 129, 200, 299):
        row = int(inputs["query_start"][0]) + position
        output = torch.zeros_like(inputs["output"])
        one, start = inputs["query_lens"].new_tensor([1]), inputs["query_start"].new_tensor([row])
        alone = dict(inputs, output=output, query_start=start, query_lens=one, seq_lens=one + position)
        attend_causally(**alone, traits=traits)
        assert torch.equal(output[row], inputs["output"][row]), position


@pytest.mark.parametrize("name, num_kv_heads", BITS)
@pytest.mark.parametrize("context", [0, 126, 200])
@pytest.mark.parametrize("kv_layout, dtype", LAYOUTS)
def test_a_node_has_the_bits_of_its_path_alone(kv_layout, dtype, context, name, num_kv_heads):
    """Whatever other nodes the tree has."""
    requires_operators()
    traits = TRAITS.get(name, NO_TRAITS)
    whole = make_inputs((context,), (40,), num_kv_heads=num_kv_heads, dtype=dtype, kv_layout=kv_layout, garbage=0.0)
    tree_attention(**whole, traits=traits)
    q0, t0 = int(whole["query_start"][0]), int(whole["tree_start"][0])
    for node in (0, 1, 7, 20, 39):
        path = whole["mask"][0, node].nonzero().flatten()
        one, length = whole["query_lens"].new_tensor([1]), len(path)
        output = torch.zeros_like(whole["output"])
        alone = dict(
            whole,
            output=output,
            query_start=whole["query_start"] + node,
            query_lens=one,
            tree_key=whole["tree_key"][t0 + path],
            tree_value=whole["tree_value"][t0 + path],
            tree_start=one - 1,
            tree_lens=one * length,
            mask=torch.ones(1, 1, length, dtype=torch.bool),
        )
        tree_attention(**alone, traits=traits)
        assert torch.equal(output[q0 + node], whole["output"][q0 + node]), node


@pytest.mark.parametrize(
    "name, change",
    [
        ("window of one key", {"window": 2}),
        ("window within the tree", {"window": 4}),
        ("window of some context", {"window": 39}),
        ("window of more than a page", {"window": 171}),
        ("chunks within the tree", {"local": 4}),
        ("chunks of some context", {"local": 49}),
        ("soft cap", {"soft_cap": 0.0}),
        ("sinks", {"sinks": None}),
        ("sinks", {"sinks": HEADS.flip(0)}),
        ("ALiBi", {"alibi_slopes": None}),
    ],
)
def test_a_wrong_trait_shows(backend, name, change):
    inputs = tree_inputs()
    backend(**inputs, traits=replace(TRAITS[name], **change))
    assert deviation(inputs["output"], exact(inputs, TRAITS[name])) > 1e3 * TOLERANCE[torch.float32]
