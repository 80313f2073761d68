"""Trees from a target's own MTP layers: the tokens are those of plain vLLM, and drafts are accepted."""

from __future__ import annotations

import pytest

from tests.doubles import mtp
from tests.doubles.architectures import ARCHITECTURES, Architecture
from tests.doubles.gated_delta import in_float32
from tests.hosts.conftest import (
    WHOLE,
    acceptance_length,
    answers_of,
    check_prefix_cache_hits,
    runner_of,
    some,
)
from tests.hosts.same_as_plain import PARAMS, PROMPTS, SCARCE, SETTINGS, check_against_chain, check_as_plain
from tests.hosts.test_architectures import has_reference_mla
from tests.hosts.test_draft_tree import check_compiled
from vllm_specplug.config import ConfigError

PROVEN = True
TREE = {"method": "mtp_tree", "num_speculative_tokens": 12, "draft_depth": 4, "draft_top_k": 3, **WHOLE}


@pytest.fixture(scope="module", autouse=True)
def float32_operators():
    with pytest.MonkeyPatch.context() as patch:
        in_float32(patch)
        yield


#: Windows and states have blocks of their own; with them vLLM finds no cached prefix at these lengths.
BLOCKS = {"Step 3.5": 18, "Qwen3-Next": 22, "Qwen3.5": 22, "Qwen3.5 MoE": 22, "Nemotron-H": 22}
#: Families that `make test` runs; their forwards and names of tensors differ.
OFTEN = ("MiMo", "Step 3.5", "DeepSeek-V3")
_TEXT = Architecture("", "", options={"language_model_only": True})
#: Options of further targets.
OPTIONS = {**ARCHITECTURES, "GLM-OCR": _TEXT, "EXAONE 4.5": _TEXT}


@pytest.fixture(scope="module", params=some(mtp.FAMILIES, OFTEN))
def target(request, checkpoints, tmp_path_factory) -> str:
    checkpoints[request.param] = mtp.write_with_mtp(tmp_path_factory.mktemp("mtp") / "target", request.param)
    return request.param


def test_same_as_plain(engine, target, expert_group):
    """Too few KV blocks, chunked prefill, then prompts that continue answers."""
    architecture = OPTIONS.get(target, Architecture("", ""))
    settings = {**SETTINGS, **architecture.options}
    plain = engine(target=target, **settings, **architecture.plain)
    scarce = {**SCARCE, "num_gpu_blocks_override": BLOCKS.get(target, 12)}
    llm = engine(target=target, speculative_config=TREE, **scarce, **settings)
    assert check_as_plain(plain, llm) > 1.2
    assert runner_of(llm).drafter.draft_layers
    if target not in BLOCKS and not has_reference_mla(architecture):
        check_prefix_cache_hits(plain, llm, PROMPTS[:2])


@pytest.mark.wide
def test_torch_compile(engine, checkpoints, tmp_path):
    checkpoints["compiled"] = mtp.write_with_mtp(tmp_path / "compiled", "MiMo")
    check_compiled(engine, None, TREE, target="compiled")


def test_a_target_without_mtp_layers(engine):
    with pytest.raises(
        ConfigError, match="vLLM finds no MTP layers in .*use a model that has some, .*or use the method eagle2"
    ):
        engine(speculative_config=TREE)


def test_several_layers(engine, checkpoints, tmp_path, caplog, expert_group):
    """The first of two drafts all levels."""
    caplog.set_level("INFO", "vllm_specplug")
    checkpoints["two"] = mtp.write_with_mtp(tmp_path / "two", "GLM-4 MoE", count=2)
    expected = answers_of(engine(target="two", **SETTINGS), PROMPTS, PARAMS)
    llm = engine(target="two", speculative_config={**TREE, "num_speculative_tokens": 11}, **SETTINGS)
    assert "the first of 2 MTP modules drafts trees of up to 10 nodes" in caplog.text
    assert answers_of(llm, PROMPTS, PARAMS) == expected
    assert acceptance_length(llm) > 1.2


def test_a_union_with_a_measured_budget(engine, checkpoints, tmp_path_factory):
    """The budget times the layer's forwards at start, and drafting pauses."""
    checkpoints["union"] = mtp.write_with_mtp(tmp_path_factory.mktemp("mtp") / "union", "MiMo")
    expected = answers_of(engine(target="union", **SETTINGS), PROMPTS, PARAMS)
    sources = [{"method": "mtp_tree"}, {"method": "lookup"}]
    union = {"method": "union", "sources": sources, "budget": "measured", "num_speculative_tokens": 12}
    llm = engine(target="union", speculative_config=union, **SETTINGS)
    assert runner_of(llm).drafter.draft_layers
    assert answers_of(llm, PROMPTS, PARAMS) == expected


def test_a_tree_accepts_more_than_vllms_chain(engine, checkpoints, tmp_path_factory):
    """The same MTP layer, and the same number of verified tokens."""
    checkpoints["chain"] = mtp.write_with_mtp(tmp_path_factory.mktemp("mtp") / "chain", "MiMo")
    stock = engine(target="chain", speculative_config={"method": "mtp", "num_speculative_tokens": 4}, **SETTINGS)
    llm = engine(target="chain", speculative_config={**TREE, "num_speculative_tokens": 4}, **SETTINGS)
    check_against_chain(stock, llm, 1.2)


def test_an_assistant_that_reads_the_targets_cache(engine, checkpoints, tmp_path):
    """Gemma 4: a checkpoint of its own, without keys and values; two KV cache groups."""
    checkpoints["Gemma 4"], assistant = mtp.write_gemma(tmp_path)
    plain = engine(target="Gemma 4", **SETTINGS)
    tree, scarce = {**TREE, "model": str(assistant)}, {**SCARCE, "num_gpu_blocks_override": 14}
    assert check_as_plain(plain, engine(target="Gemma 4", speculative_config=tree, **scarce, **SETTINGS)) > 1.2
