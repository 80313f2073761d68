"""Tree attention in two parts: against the reference, with stand-ins for kernels that need a GPU, and in the engine."""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from tests.doubles.attention_inputs import attend_on_device, make_inputs
from tests.doubles.attention_reference import ReferenceContext
from tests.doubles.stand_ins import install_flash, install_xformers
from tests.hosts.conftest import runner_of
from tests.unit.kernels.test_tree_attention import TOLERANCE
from tests.v2.conftest import ENGINE, NoLookAtTheDevice, answers, same, watch_rounds
from tests.v2.test_identity import TREE
from tests.v2.test_kernels import DEVICE, TRAITS, exact, on_device, per_head, trait_inputs, traits_on_device
from vllm_specplug.config import ConfigError, parse_options
from vllm_specplug.core.attention_traits import NO_TRAITS, AttentionTraits
from vllm_specplug.cpu.kernels.tree_attention import TOKEN_LAYOUT
from vllm_specplug.gpu import flash_context
from vllm_specplug.gpu.attention import check_caches, use_tree_attention
from vllm_specplug.gpu.kernels import xformers_context
from vllm_specplug.gpu.kernels.context_attention import ContextAttention
from vllm_specplug.gpu.kernels.merged_tree_attention import merged_tree_attention
from vllm_specplug.gpu.kernels.xformers_context import XformersContext
from vllm_specplug.vllm import features
from vllm_specplug.vllm.check import VllmReport, check_symbols
from vllm_specplug.vllm.features import Setting, check_tree_attention
from vllm_specplug.vllm.manifest import MANIFEST_FLASH

HERE_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-ins are for machines without a GPU")


def like_the_host(inputs):
    """A token's heads side by side in memory, as the host's default layout has them."""
    return {**inputs, "kv_cache": inputs["kv_cache"].transpose(1, 2).contiguous().transpose(1, 2)}


def run(context, inputs, **options):
    """The output on the CPU; ``inputs`` stay."""
    device = on_device({**inputs, "output": inputs["output"].clone()})
    device["traits"] = traits_on_device(device.get("traits", NO_TRAITS))
    attend_on_device(partial(merged_tree_attention, context), **device, **options)
    return device["output"].cpu()


def assert_matches(context, inputs, expected=None, **options):
    expected = exact(inputs) if expected is None else expected
    output = run(context, inputs, **options).double()
    written = ~expected.isnan()
    assert written.any()
    assert torch.equal(written, ~output.isnan()), "rows named by no request were written, or garbage leaked"
    deviation = (output - expected)[written].abs().max() / expected[written].abs().max()
    # The context's output is rounded to bfloat16 before it is merged; the interpreter truncates where hardware rounds.
    assert deviation <= TOLERANCE[inputs["query"].dtype] * (3 if inputs["query"].dtype == torch.bfloat16 else 1)


@pytest.fixture(params=["reference", "flash 2", "flash 3", "flash 4", "xformers"])
def context(request, monkeypatch):
    """Made for heads of 64; on a GPU the real ones."""
    name, _, version = request.param.partition(" ")
    if name == "reference":
        return ReferenceContext()
    if torch.cuda.is_available():
        if name == "xformers":
            pytest.importorskip("xformers")
        elif flash_context.get_flash_attn_version(head_size=64) != int(version):
            pytest.skip("not this device's version")
    elif name == "flash":
        install_flash(monkeypatch, int(version))
    else:
        install_xformers(monkeypatch)
    return flash_context.FlashContext(64) if name == "flash" else XformersContext(64)


def skip_wide(context, dtype):
    if torch.cuda.is_available() and dtype == torch.float32 and not isinstance(context, ReferenceContext):
        pytest.skip("it takes no float32")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("contexts", [(0, 5, 3), (33, 1, 0), (100, 200, 16)])
def test_against_the_reference(context, dtype, contexts):
    """Contexts of no token, some and whole pages; a request without rows; rows between the requests."""
    skip_wide(context, dtype)
    inputs = like_the_host(make_inputs(contexts, (17, 3, 0), block_size=16, dtype=dtype, kv_layout=TOKEN_LAYOUT))
    context.check_cache(inputs["kv_cache"].to(DEVICE))
    assert_matches(context, inputs)
    assert_matches(context, inputs, max_context_len=max(contexts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 9])
def test_uniform_rows(context, dtype, rows):
    skip_wide(context, dtype)
    sizes = dict(tree_lens=(12, 9), block_size=16, gap=0)
    made = make_inputs((20, 0), (rows, rows), dtype=dtype, kv_layout=TOKEN_LAYOUT, **sizes)
    assert_matches(context, like_the_host(made), uniform=True)


@pytest.mark.parametrize(
    "num_heads, num_kv_heads, head_size, block_size", [(4, 4, 32, 16), (8, 2, 128, 32), (7, 1, 80, 48), (2, 1, 256, 16)]
)
def test_shapes(num_heads, num_kv_heads, head_size, block_size):
    heads = dict(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, block_size=block_size)
    assert_matches(ReferenceContext(), make_inputs((70, 0), (9, 1), kv_layout=TOKEN_LAYOUT, **heads))


@pytest.mark.parametrize("rows, nodes", [(8, 60), (61, 61), (10, 130), (4, 0)])
def test_tree_lengths(rows, nodes):
    inputs = make_inputs((40, 7, 3), (rows, 2, 0), tree_lens=(nodes, 3, 0), kv_layout=TOKEN_LAYOUT)
    assert_matches(ReferenceContext(), inputs)


@HERE_ONLY
@pytest.mark.parametrize("version", [2, 3, 4])
def test_soft_cap_and_sinks(monkeypatch, version):
    install_flash(monkeypatch, version)
    traits = AttentionTraits(soft_cap=0.4, sinks=per_head(4))
    inputs = trait_inputs(traits, head_size=64)
    assert_matches(flash_context.FlashContext(64, 0.4), inputs)
    with pytest.raises(AssertionError):
        assert_matches(flash_context.FlashContext(64), inputs)
    inputs["traits"] = AttentionTraits(soft_cap=0.4)
    expected = exact(inputs)
    inputs["traits"] = traits
    with pytest.raises(AssertionError):
        assert_matches(flash_context.FlashContext(64, 0.4), inputs, expected)


@HERE_ONLY
@pytest.mark.parametrize("name, wrong", [("flash", {"window in the tree", "alibi"}),
                                         ("xformers", {"window in the tree", "alibi", "soft cap"})])  # fmt: skip
def test_layers_with_other_traits_keep_triton(monkeypatch, caplog, name, wrong):
    """A window over a context hides more of it the deeper the row; the rows' depths are unknown to the kernel."""
    install_flash(monkeypatch, 3) if name == "flash" else install_xformers(monkeypatch)
    traits = {which: TRAITS[which] for which in ("window in the tree", "alibi", "soft cap", "sinks")}
    layers = {
        which: SimpleNamespace(impl=SimpleNamespace(head_size=64, context=None, traits=one, is_fp8=False))
        for which, one in traits.items()
    }
    with caplog.at_level("INFO", "vllm_specplug"):
        use_tree_attention(layers, name)
    assert {which for which, layer in layers.items() if layer.impl.context is None} == wrong
    assert f"{len(wrong)} of 4 layers use 'triton'" in caplog.text
    with pytest.raises(ValueError, match="use tree_attention='triton'"):
        run(layers["sinks"].impl.context, trait_inputs(traits["alibi"]))


@HERE_ONLY
def test_no_look_at_the_device(context):
    inputs = like_the_host(make_inputs((40, 7), (9, 2), block_size=16, kv_layout=TOKEN_LAYOUT))
    with NoLookAtTheDevice():
        run(context, inputs)


# ---- negative controls


class Spoiled(ContextAttention):
    """The reference with something wrong."""

    def __init__(self, sign=1.0, longer=0):
        self.sign, self.longer, self.calls = sign, longer, 0

    def __call__(self, query, kv_cache, block_table, context_lens, scale, max_context_len):
        self.calls += 1
        lens = (context_lens + self.longer).clamp(min=0)
        output, sums = ReferenceContext()(query, kv_cache, block_table, lens, scale, max_context_len)
        return output, self.sign * sums


SPOILED = {"sign of the sums": {"sign": -1.0}, "one token less": {"longer": -1}, "one token more": {"longer": 1}}


@pytest.mark.parametrize("wrong", SPOILED)
def test_controls_of_the_context(wrong):
    inputs = make_inputs((40, 7), (9, 2), block_size=16, kv_layout=TOKEN_LAYOUT, garbage=0.5)
    expected = exact(inputs)
    inputs["output"].fill_(float("nan"))
    assert_matches(Spoiled(), inputs, expected)
    with pytest.raises(AssertionError):
        assert_matches(Spoiled(**SPOILED[wrong]), inputs, expected)


def test_control_of_the_mask():
    inputs = make_inputs((20,), (9,), kv_layout=TOKEN_LAYOUT)
    expected = exact(inputs)
    inputs["mask"][0, 8, 1] ^= True
    with pytest.raises(AssertionError):
        assert_matches(ReferenceContext(), inputs, expected)


# ---- in the engine


@pytest.fixture
def llm(engine, monkeypatch):
    """An engine whose layers' contexts are put back after the test, and nothing computed otherwise is kept."""
    llm = engine("eagle", TREE, **ENGINE)
    for layer in layers_of(llm).values():
        monkeypatch.setattr(layer.impl, "context", None)
    llm.reset_prefix_cache()
    yield llm
    llm.reset_prefix_cache()


def layers_of(llm):
    return get_layers_from_vllm_config(runner_of(llm).vllm_config, AttentionLayerBase)


def put(llm, context):
    for layer in layers_of(llm).values():
        layer.impl.context = context


@HERE_ONLY
@pytest.mark.parametrize("name", ["flash", "xformers"])
def test_same_tokens(llm, prompts, plain, monkeypatch, name):
    """Verification and the drafter's levels, through all that surrounds the kernels that need a GPU."""
    install_flash(monkeypatch, 3) if name == "flash" else install_xformers(monkeypatch)
    layers = layers_of(llm)
    use_tree_attention(layers, name)
    check_caches(layers, name)
    contexts = {type(layer.impl.context).__name__ for layer in layers.values()}
    assert contexts == {"FlashContext" if name == "flash" else "XformersContext"}
    runner, rounds = runner_of(llm), []
    sample = runner.rejection_sampler
    monkeypatch.setattr(
        runner, "rejection_sampler", lambda *args, **kwargs: rounds.append(1) or sample(*args, **kwargs)
    )
    found = answers(llm, prompts[:1])
    assert same(found, [part[:1] for part in plain])
    assert len(rounds) < len(found[0][0][0]) / 1.2  # drafts were accepted


def test_same_tokens_without_waiting_for_the_device(llm, prompts, plain, monkeypatch):
    context = Spoiled()  # by nothing
    put(llm, context)
    rounds = watch_rounds(llm, monkeypatch)
    assert same(answers(llm, prompts), plain)
    # A round is watched twice; verification alone would attend once in each of two layers.
    assert len(rounds) > 4 and context.calls > 1.5 * len(rounds)


@pytest.mark.parametrize("wrong", SPOILED)
def test_controls_in_the_engine(llm, prompts, plain, wrong):
    put(llm, Spoiled(**SPOILED[wrong]))
    assert not same(answers(llm, prompts[:1]), [part[:1] for part in plain])


# ---- the choice


def test_host_has_the_seams(monkeypatch):
    if not torch.cuda.is_available():
        install_flash(monkeypatch, 2)
    assert check_symbols(MANIFEST_FLASH).problems == []
    interface = sys.modules["vllm.vllm_flash_attn.flash_attn_interface"]
    monkeypatch.setattr(interface, "flash_attn_varlen_func", lambda q, k, v, cu_seqlens_q, **_: None)
    assert "not max_seqlen_q, seqused_k" in check_symbols(MANIFEST_FLASH).problems[0]


def choose(monkeypatch, name, cuda=True, **changes):
    monkeypatch.setattr(features, "current_platform", SimpleNamespace(is_cuda=lambda: cuda))
    monkeypatch.setattr(features, "check_symbols", lambda _: VllmReport("vllm", "0.32.0", changes.pop("problems", [])))
    model = SimpleNamespace(
        get_head_size=lambda: changes.get("head_size", 128), dtype=changes.get("dtype", torch.bfloat16)
    )
    options = parse_options({"method": "eagle2", "model": "drafter", "tree_attention": name})
    check_tree_attention(options, Setting(model, None, None, changes.get("v2", True)))


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        (
            "flash",
            {"cuda": False},
            "tree_attention='flash' cannot be used: it runs on CUDA only, with the V2 model runner: leave it out",
        ),
        ("xformers", {"cuda": False}, "CUDA only"),
        ("flash", {"v2": False}, "CUDA only"),
        ("flash", {"dtype": torch.float32}, "no float32: use --dtype bfloat16"),
        ("flash", {"head_size": 512}, "no heads of 512: use tree_attention='triton'"),
        ("flash", {"problems": ["gone"]}, "gone"),
        ("xformers", {}, "not installed: pip install xformers"),
        ("xformers", {"installed": True, "head_size": 80}, "no heads of 80"),
    ],
)
def test_refused_at_start(monkeypatch, name, changes, named):
    changes = dict(changes)
    if changes.pop("installed", False):
        install_xformers(monkeypatch)
    elif name == "xformers":
        monkeypatch.setattr(xformers_context, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=named):
        choose(monkeypatch, name, **changes)


def test_taken(monkeypatch):
    install_xformers(monkeypatch)
    for name in ("triton", "flash", "xformers"):
        choose(monkeypatch, name)
    choose(monkeypatch, "triton", cuda=False)


@HERE_ONLY
def test_refused_by_the_engine(engine):
    with pytest.raises(ConfigError, match="CUDA only"):
        engine("eagle", {**TREE, "tree_attention": "flash"}, **ENGINE)


@HERE_ONLY
def test_refused_with_the_layers(monkeypatch):
    impl = SimpleNamespace(head_size=64, context=None, traits=NO_TRAITS, is_fp8=False)
    layer = SimpleNamespace(impl=impl, kv_cache=torch.zeros(3, 2, 16, 128))
    install_flash(monkeypatch, 2)
    monkeypatch.setattr(flash_context, "get_flash_attn_version", lambda **_: None)
    with pytest.raises(ConfigError, match="no FlashAttention for this device, or use tree_attention='triton'"):
        use_tree_attention({"layer": layer}, "flash")
    install_xformers(monkeypatch)
    use_tree_attention({"layer": layer}, "xformers")
    with pytest.raises(ConfigError, match="LBNHC"):  # pages with heads outside
        check_caches({"layer": layer}, "xformers")
    layer.kv_cache = torch.zeros(3, 24, 2, 128).transpose(1, 2)
    with pytest.raises(ConfigError, match="block-size 16"):
        check_caches({"layer": layer}, "xformers")
    layer.kv_cache = torch.zeros(3, 16, 2, 128).transpose(1, 2)
    check_caches({"layer": layer}, "xformers")


def test_a_kernel_that_does_not_run_is_named(monkeypatch):
    class Broken(ContextAttention):
        def __call__(self, *_):
            raise RuntimeError("no such operator\nand more")

    layer = SimpleNamespace(impl=SimpleNamespace(context=Broken()), kv_cache=torch.zeros(3, 2, 16, 128))
    with pytest.raises(ConfigError, match=r"does not run here \(no such operator\)"):
        check_caches({"layer": layer}, "flash")
    layer.impl.context = type("Shapes", (ContextAttention,), {"__call__": lambda self, query, *_: (query, query)})()
    with pytest.raises(ConfigError, match="unsupported version"):
        check_caches({"layer": layer}, "flash")


def test_real_xformers(monkeypatch):
    """Its own kernel, where it is installed with a Triton that it fits: on a GPU, or in the interpreter."""
    pytest.importorskip("xformers")
    monkeypatch.setenv("XFORMERS_ENABLE_TRITON", "1")
    context = XformersContext(64)
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    if not torch.cuda.is_available():
        for operator in context._operators.values():
            operator.SUPPORTED_DEVICES, operator.SUPPORTED_DTYPES = {"cpu"}, {torch.float32}
    for block_size, contexts, rows in ((16, (0, 5), 17), (16, (100, 37), 1), (64, (200, 0), 9), (48, (70, 3), 9)):
        made = make_inputs(contexts, (rows, 1), block_size=block_size, dtype=dtype, kv_layout=TOKEN_LAYOUT)
        inputs = like_the_host(made)
        try:
            context.check_cache(inputs["kv_cache"].to(DEVICE))
        except ValueError as error:
            pytest.skip(str(error))
        assert_matches(context, inputs, max_context_len=max(contexts))
