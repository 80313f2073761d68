"""Targets with quantised weights: tokens are plain vLLM's, and drafters read the LM head through its own methods."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from vllm import LLM, SamplingParams

from tests.doubles import tiny
from tests.doubles.quantised import write_quantised
from tests.host_versions import SAMPLES_GPTQ_EXACTLY
from tests.hosts.conftest import (
    ENGINE,
    TREE,
    acceptance_length,
    answers_of,
    check_prefix_cache_hits,
    counters,
    make_prompts,
    needs_avx512,
    runner_of,
)
from vllm_specplug.utils.environment import multiplies_bytes
from vllm_specplug.vllm.drafters.target_parts import TargetHead

#: Seen on vLLM 0.32.0.
pytestmark = pytest.mark.skipif(
    torch.cpu._is_amx_tile_supported(),
    reason="with AMX vLLM's 8-bit products refuse float32, and texts in bfloat16 differ more often",
)
PROVEN = True
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=5, top_p=0.95, max_tokens=32, ignore_eos=True)
MEDUSA = {"method": "medusa", "num_speculative_tokens": 20, "budget": "fixed"}
#: Format, whether the LM head is quantised too, dtype, drafter.  vLLM's 4-bit kernels on a CPU take no float32.
CHECKPOINTS = [
    ("w8a8", False, "float32", "reduced"),
    ("w8a8", True, "float32", "eagle"),
    pytest.param("w4a16", True, "bfloat16", "reduced", marks=needs_avx512),
    pytest.param("gptq", False, "bfloat16", "eagle", marks=needs_avx512),
    pytest.param("awq", False, "bfloat16", "reduced", marks=needs_avx512),
]
#: vLLM quantises the weights while it loads them.
ONLINE = ["int8_per_channel_weight_only", "fp8_per_channel"]


@pytest.fixture(scope="module")
def prompts():
    return make_prompts(12)


@pytest.fixture(scope="module")
def quantised(checkpoints, tmp_path_factory):
    """``quantised(form, lm_head)``: the name of a checkpoint."""

    def write(form, lm_head):
        name = f"{form}-{lm_head}"
        if name not in checkpoints:
            checkpoints[name] = write_quantised(
                tmp_path_factory.mktemp("quantised") / name, checkpoints["target"], form, lm_head
            )
        return name

    return write


def answers(llm, prompts, params=GREEDY):
    return answers_of(llm, prompts, params)


def check(engine, prompts, drafter, most_differing=0, tree=None, **options):
    """The tokens of plain vLLM, whose batches do not change them; its kernels quantise each row for itself."""
    plain, llm = engine(**options), engine(drafter, tree, **options)
    expected = answers(plain, prompts)
    assert [answers(plain, [prompt])[0] for prompt in prompts[:4]] == expected[:4]
    before = counters(llm)
    assert answers(llm, prompts) == expected
    assert acceptance_length(llm, before) > 1.2
    sampled = zip(answers(llm, prompts, SEEDED), answers(plain, prompts, SEEDED), strict=True)
    assert sum(ours != theirs for ours, theirs in sampled) <= most_differing
    return llm


@pytest.mark.parametrize(("form", "lm_head", "dtype", "drafter"), CHECKPOINTS)
def test_same_as_plain(engine, quantised, prompts, form, lm_head, dtype, drafter):
    most_differing = int(form == "gptq" and not SAMPLES_GPTQ_EXACTLY)
    tree = {"draft_int8": dtype == "bfloat16" and multiplies_bytes()}
    llm = check(engine, prompts, drafter, most_differing, tree, target=quantised(form, lm_head), dtype=dtype)
    head = runner_of(llm).drafter._scorer.head
    assert (head is not None) == (drafter == "reduced")
    if head is not None and dtype == "bfloat16":
        assert (head.quantised is not None) == tree["draft_int8"]  # the drafter's own 8 bits, of dequantised rows


@needs_avx512
@pytest.mark.parametrize("quantization", ONLINE)
def test_online(engine, prompts, quantization):
    check(engine, prompts, "eagle", dtype="bfloat16", quantization=quantization)


def test_the_drafter_stays_unquantised(engine, quantised):
    drafter = runner_of(engine("eagle", target=quantised("w8a8", True))).drafter.model
    assert {tensor.dtype for name, tensor in drafter.named_parameters() if "lm_head" not in name} == {torch.float32}


@needs_avx512
@pytest.mark.parametrize("form", ["w8a8", "w4a16"])
def test_rows_of_a_quantised_head(engine, checkpoints, quantised, form):
    """Its own kernel over an identity matrix returns the dequantised weights."""
    name = quantised(form, True)
    runner = runner_of(engine(target=name, dtype="bfloat16"))
    head = TargetHead(runner.model, tiny.HIDDEN, torch.bfloat16)
    ids = torch.tensor([159, 3, 4, 100])
    assert not head.gathers
    original = load_file(checkpoints["target"] / "model.safetensors")["lm_head.weight"][ids]
    error = (head.rows(ids).float() - original).abs().max() / original.abs().max()
    assert error < {"w8a8": 0.01, "w4a16": 0.1}[form]
    hidden = torch.randn(5, tiny.HIDDEN, dtype=torch.bfloat16)
    assert torch.allclose((hidden @ head.rows(ids).T).float(), head.logits(hidden)[:, ids].float(), atol=0.3)


def test_tokens_of_the_text_join_a_draft_vocabulary(engine, quantised):
    """They need single rows of the LM head, which a quantised one does not give."""
    for lm_head in (False, True):
        drafter = runner_of(engine("reduced", target=quantised("w8a8", lm_head))).drafter
        assert (drafter._vocabulary is None) == lm_head


def test_tied_head(engine, checkpoints, prompts, tmp_path_factory):
    """The LM head is the embedding, which is not quantised."""
    path = write_quantised(tmp_path_factory.mktemp("tied") / "tied", checkpoints["target"], "w8a8")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    checkpoints["tied"] = path
    plain, llm = engine(target="tied"), engine("reduced", target="tied")
    assert answers(llm, prompts) == answers(plain, prompts)
    assert counters(llm)["draft_tokens"] > 0


@pytest.fixture(scope="module")
def medusa(engine, checkpoints, quantised, prompts, tmp_path_factory):
    """Heads that know the answers of the quantised target by heart, and the same with a draft vocabulary."""
    folder, plain = tmp_path_factory.mktemp("heads"), answers(engine(target=quantised("w8a8", True)), prompts)
    texts = [(prompt["prompt_token_ids"], answer[0]) for prompt, answer in zip(prompts, plain, strict=True)]
    features = tiny.extract_features(checkpoints["target"], texts, folder / "features")
    checkpoints["medusa-w8a8"] = tiny.write_medusa(folder / "medusa", checkpoints["target"], features)


def test_medusa(engine, quantised, prompts, medusa):
    name = quantised("w8a8", True)
    llm = engine("medusa-w8a8", {**MEDUSA, "draft_int8": multiplies_bytes()}, target=name)
    before = counters(llm)
    assert answers(llm, prompts) == answers(engine(target=name), prompts)
    assert acceptance_length(llm, before) > 1.3


@pytest.mark.parametrize("method", ["union", "measured"])
def test_other_methods(engine, checkpoints, quantised, prompts, method):
    name = quantised("w8a8", True)
    eagle = {**TREE, "model": str(checkpoints["eagle"])}
    source = {key: value for key, value in eagle.items() if key != "budget"}
    speculative = {
        "union": {"method": "union", "sources": [source, {"method": "lookup"}], "num_speculative_tokens": 24},
        "measured": {**eagle, "budget": "measured"},
    }[method]
    expected = answers(engine(target=name), prompts)
    llm = LLM(str(checkpoints[name]), speculative_config=speculative, **ENGINE)
    engine.kept.append(llm)
    assert answers(llm, prompts) == expected
    assert answers(llm, prompts) == expected
    if method == "measured":
        assert runner_of(llm).serving_budget.facts["quantization"] == "compressed-tensors"
    else:
        assert acceptance_length(llm) > 1.05


def test_preemption_prefix_hits_and_chunked_prefill(engine, quantised, prompts):
    name = quantised("w8a8", True)
    long = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    plain = engine(target=name, block_size=32)
    scarce = {"num_gpu_blocks_override": 14, "enable_prefix_caching": False, "max_num_batched_tokens": 48}
    llm = engine("eagle", target=name, block_size=32, **scarce)
    assert answers(llm, prompts, long) == answers(plain, prompts, long)
    assert counters(llm)["preemptions"] > 0
    check_prefix_cache_hits(plain, engine("reduced", target=name, block_size=32), prompts[:8])
