"""Latents (MLA) on the V2 runner: the kernels against their reference, tokens of plain vLLM, the proof at start.

vLLM's decode kernel and ours run in Triton's interpreter; prompts are plain torch.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.attention import MLAAttention

from tests.doubles.architectures import ARCHITECTURES, write_head, write_target
from tests.doubles.attention_inputs import device_arguments, make_inputs
from tests.hosts.conftest import acceptance_length, counters, expert_group, runner_of  # noqa: F401
from tests.unit.kernels.test_tree_attention import TOLERANCE, exact
from tests.v2.conftest import answers, same, watch_rounds
from tests.v2.test_hybrid import LOOKUP, PARAMS, PROMPTS, TREE, make_params
from tests.v2.test_proof import kept_nothing, prove_again  # noqa: F401
from tests.v2.test_state_layers import COMMON, NUM_ROWS, NUM_TREE_ROWS, rows_of
from vllm_specplug.config import ConfigError
from vllm_specplug.core.attention_traits import NO_TRAITS
from vllm_specplug.core.proof import ProofFailed
from vllm_specplug.cpu.kernels.tree_attention import LATENT_LAYOUT
from vllm_specplug.gpu import mla, step
from vllm_specplug.gpu.attention import tell_builders, use_tree_attention

PROVEN = True


def widen_bfloat16(monkeypatch):
    """The interpreter's dot product misreads bfloat16 as integers, also in vLLM's kernel."""
    honest = mla.decode_attention_fwd

    def widened(query, key, value, *args, **named):
        if query.dtype == torch.bfloat16 and not torch.cuda.is_available():
            query, key, value = query.float(), key.float(), value.float()
        honest(query, key, value, *args, **named)

    monkeypatch.setattr(mla, "decode_attention_fwd", widened)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("contexts", "rows", "heads", "sizes", "splits"),
    [
        ((100, 5), (17, 3), 4, (48, 32), 1),
        ((0, 40, 7), (9, 0, 70), 3, (80, 64), 2),
        ((130,), (5,), 16, (576, 512), 4),
        ((3,), (4,), 1, (48, 32), 1),
    ],
)
def test_kernel(monkeypatch, dtype, contexts, rows, heads, sizes, splits):
    """Several words of a mask, empty contexts and trees, one head; contexts in parts."""
    monkeypatch.setattr(mla, "_num_splits", lambda *_: splits)
    widen_bfloat16(monkeypatch)
    shape = {"num_heads": heads, "num_kv_heads": 1, "head_size": sizes[0], "value_size": sizes[1], "block_size": 16}
    inputs = make_inputs(contexts, rows, dtype=dtype, kv_layout=LATENT_LAYOUT, **shape)
    expected = exact(inputs, NO_TRAITS)
    given = device_arguments(**inputs)
    mla.latent_tree_attention(
        given["query"].contiguous(),
        output := given["output"].clone(),
        given["pages"],
        given["tree"],
        given["tree_key"][:, 0],
        given["scale"],
        torch.ones(()),
    )
    written = ~expected.isnan()
    assert written.any() and torch.equal(written, ~output.isnan())
    deviation = (output.double() - expected)[written].abs().max() / expected[written].abs().max()
    assert deviation <= TOLERANCE[dtype] * (1 if dtype == torch.float32 else 2)


def test_kernels_compile_at_start():
    """For all lengths of a context; nothing is written."""
    cache = torch.randn(3, 16, 48)
    impl = SimpleNamespace(num_heads=2, head_size=48, kv_lora_rank=32, scale=1.0)
    kept, calls = cache.clone(), []
    with pytest.MonkeyPatch.context() as patch:
        honest = mla.decode_attention_fwd
        patch.setattr(mla, "decode_attention_fwd", lambda *args, **named: (calls.append(args), honest(*args, **named)))
        patch.setattr(mla.current_platform, "num_compute_units", lambda: 8)
        layer = SimpleNamespace(impl=impl, kv_cache=cache, _k_scale=torch.ones(()))
        mla.compile_kernels({"layer": layer}, torch.zeros(1, 7, 1, dtype=torch.int64), 4100)
    assert torch.equal(cache, kept) and {args[8] for args in calls} == {1, 2, 4, 8}


class PlainBuilder:
    """Stands for vLLM's builder."""

    def __init__(self, _spec, _names, config, _device):
        assert config.speculative_config is None

    def build(self, _prefix, common, fast_build=False):
        return SimpleNamespace(num_decodes=1, num_decode_tokens=1, num_prefills=1, prefill="prompts", common=common)


class Builder(mla.TreeMLABuilder, PlainBuilder):
    pass


def test_metadata_of_a_step():
    """To vLLM's layer rows of trees are rows of decoding; the requests after them keep vLLM's metadata."""
    builder = Builder(None, [], SimpleNamespace(speculative_config=1), "cpu")
    assert builder.build(0, COMMON).common is COMMON  # a step without trees
    tell_builders([[SimpleNamespace(metadata_builders=[builder])]], rows_of)
    found = builder.build(0, COMMON)
    assert (found.num_decodes, found.num_decode_tokens, found.num_prefills) == (3, NUM_TREE_ROWS + 1, 1)
    assert found.prefill == "prompts" and found.others.common.query_start_loc.tolist() == [0, 4, 5]
    assert len(found.decode.block_table) == 2 and found.num_tree_rows == NUM_TREE_ROWS
    metadata = {"layer": found}
    assert step.verify(metadata, rows_of(), set()) == metadata
    builder.rows_of_step = lambda: rows_of(all_rows=True, num_tree_rows=None)
    found = builder.build_for_cudagraph_capture(COMMON)
    assert found.others is None and found.num_tree_rows == found.num_decode_tokens == NUM_ROWS
    builder.rows_of_step = lambda: rows_of(num_tree_rows=None)
    with pytest.raises(RuntimeError, match="prompt rows before a tree"):
        builder.build(0, COMMON)


#: Prompts are read in chunks where vLLM does so on this CPU.
ENGINE = {"block_size": 16, "max_num_batched_tokens": 40, "max_num_seqs": 3, "max_model_len": 128}
#: vLLM's own choice with AMX takes bfloat16 only.
PLAIN = {**ENGINE, "attention_config": {"backend": "CPU_MLA"}}


@pytest.fixture(scope="module")
def latent(checkpoints, tmp_path_factory):
    """A target with MLA, and a head."""
    folder = tmp_path_factory.mktemp("latent")
    write_head(folder / "head", write_target(folder / "target", ARCHITECTURES["DeepSeek-V3"]))
    checkpoints |= {"latent": folder / "target", "latent head": folder / "head"}
    return "latent"


@pytest.fixture
def expected(engine, latent, expert_group):  # noqa: F811
    return answers(engine(target=latent, **PLAIN), PROMPTS, PARAMS)


@pytest.fixture
def served(engine, latent):
    return engine("latent head", TREE, target=latent, **ENGINE)


@pytest.mark.usefixtures("expert_group")
def test_tokens(expected, served, monkeypatch):
    """No value is read back between the rows and the next drafts."""
    rounds = watch_rounds(served, monkeypatch)
    assert same(answers(served, PROMPTS, PARAMS), expected)
    assert acceptance_length(served) > 1.1 and len(rounds) > 4


@pytest.mark.wide
@pytest.mark.usefixtures("expert_group")
def test_tokens_with_lookup(engine, latent):
    """Answers of two tokens, so that they repeat; a request is preempted, and a prompt is sent again."""
    params = make_params(logit_bias={7: 100.0, 11: 100.0})
    plain = answers(engine(target=latent, **PLAIN), PROMPTS, params)
    few = {**ENGINE, "max_model_len": 96, "num_gpu_blocks_override": 7}
    llm = engine(target=latent, speculative_config=LOOKUP, **few)
    assert same(answers(llm, PROMPTS, params), plain)
    assert acceptance_length(llm) > 1.2 and counters(llm)["preemptions"]
    longest = max(range(3), key=lambda i: len(PROMPTS[i]["prompt_token_ids"]))
    (again,) = llm.generate(PROMPTS[longest], params[longest], use_tqdm=False)
    assert list(again.outputs[0].token_ids) == plain[0][longest][0]
    assert again.num_cached_tokens >= 16 or not torch.cpu._is_amx_tile_supported()  # vLLM caches no latents there


@pytest.mark.wide
@pytest.mark.usefixtures("expert_group")
def test_cuda_graphs(graph_engine, latent, expected):
    """Trees from recorded graphs."""
    llm = graph_engine("latent head", TREE, target=latent, **ENGINE)
    assert same(answers(llm, PROMPTS[:2], PARAMS[:2]), [found[:2] for found in expected])


# ---- the proof at start


def not_committed(patch, runner):
    patch.setattr(runner, "_committed", [])


def without_rotary_part(patch, runner):
    """Rows of a tree see no positions of each other."""
    honest = mla.continue_with_tree

    def faulty(query, output, context, sums, tree, latents, scale):
        latents[:, output.shape[2] :] = 0
        honest(query, output, context, sums, tree, latents, scale)

    patch.setattr(mla, "continue_with_tree", faulty)


def context_of_less_weight(patch, runner):
    honest = mla.continue_with_tree
    patch.setattr(
        mla,
        "continue_with_tree",
        lambda query, output, context, sums, *rest: honest(query, output, context, sums - 1, *rest),
    )


@pytest.mark.wide
@pytest.mark.parametrize("fault", [without_rotary_part, not_committed, context_of_less_weight])
@pytest.mark.usefixtures("expert_group")
def test_the_proof_finds_faults(served, kept_nothing, fault):  # noqa: F811
    with pytest.MonkeyPatch.context() as patch:
        fault(patch, runner_of(served))
        with pytest.raises(ProofFailed, match="differs by .* from plain decoding"):
            prove_again(served)


# ---- what is refused


def test_what_is_refused(monkeypatch):
    monkeypatch.setattr(mla.TritonMLAImpl, "__init__", lambda self, **sizes: vars(self).update(sizes))
    mla.TreeTritonMLAImpl(kv_cache_dtype="auto")
    with pytest.raises(ConfigError, match="16 bits or more: found --kv-cache-dtype fp8_e4m3, use auto"):
        mla.TreeTritonMLAImpl(kv_cache_dtype="fp8_e4m3")
    with pytest.raises(ConfigError, match="tree_attention='flash' reads no latents .* use tree_attention='triton'"):
        use_tree_attention({"layer": MLAAttention.__new__(MLAAttention)}, "flash")
