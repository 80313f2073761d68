"""Token identity with plain vLLM on architectures that the product does not name: see ``doubles/architectures.py``."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.distributed import parallel_state
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsLinearMethod

from tests.architecture_table import METHODS, RESULTS, ROOT, listed, written
from tests.doubles import images, tiny
from tests.doubles.adapters import write_adapter
from tests.doubles.architectures import ARCHITECTURES, REFUSED, Architecture, write_head, write_target
from tests.doubles.gated_delta import in_float32
from tests.doubles.quantised import write_quantised
from tests.host_versions import TAKES_FLOAT32_SINKS
from tests.hosts.conftest import (
    ENGINE,
    TREE,
    acceptance_length,
    answers_of,
    counters,
    no_collections,
    runner_of,
    token_ids,
)
from tests.hosts.same_as_plain import PARAMS, PROMPTS
from vllm_specplug.config import ConfigError
from vllm_specplug.core.attention_traits import NO_TRAITS

PROVEN = True
SETTINGS = {**ENGINE, "block_size": 32, "kv_cache_memory_bytes": 8 << 20}
#: Prompts of more tokens are read in chunks.  (Plain vLLM fails there on a CPU where a sampled request has a seed.)
CHUNK = 64
SPECULATIVE = {"eagle2": TREE, "lookup": {"method": "lookup", "num_speculative_tokens": 12, "budget": "fixed"}}
#: Of many kinds of layers.  Soft caps, sinks and ALiBi are in ``test_attention_traits``, M-RoPE in ``test_images``,
#: adapters in ``test_lora``, others in ``test_same_bits``.  The rest are compared with ``-m wide``.
KINDS = ("GPT-2", "Cohere2", "Qwen3-MoE", "Qwen3-Next", "Falcon-H1", "Llama 4", "DeepSeek-V3")
#: Where vLLM finds no prefix of these lengths if a head lies beside the target.
FEW_PREFIXES = ("Gemma 4", "Qwen3-Next", "Qwen3.5", "Qwen3.5 MoE", "Falcon-H1")
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
#: vLLM finds no shorter prefix where a head lies beside layers with windows: it drops a block of each group.
LONG_PROMPT = [{"prompt_token_ids": [3 + 7 * i % 147 for i in range(190)]}]


@dataclass(frozen=True)
class Answers:
    """What plain vLLM answers.

    Attributes:
        mixed: to ``PROMPTS`` with ``PARAMS``.
        first, grown, second: to the long prompt; that prompt with its answer; what is answered to it.
    """

    mixed: list[Any]
    first: list[Any]
    grown: list[dict[str, list[int]]]
    second: list[Any]


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., Any]]:
    """``start(path, **options)``: an engine, kept to the end: the end of one takes the process's parallel state."""
    kept = []

    def start(path: Path, **options: Any) -> Any:
        # The process's groups are of its first engine, which may have no experts; they are spread over its one rank.
        if parallel_state._TP is not None and parallel_state._EP is None:
            patch.setattr(parallel_state, "_EP", parallel_state._TP)
        kept.append(LLM(str(path), **{**SETTINGS, **options}))
        return kept[-1]

    with pytest.MonkeyPatch.context() as patch:
        in_float32(patch)
        yield start
        with no_collections():
            kept.clear()
    gc.collect()


def generate(llm: Any, folder: Path, prompts: list[Any], params: Any) -> list[Any]:
    """Ask with an adapter, if there is one, for half of the greedy and half of the sampled prompts."""
    adapter = LoRARequest("adapter", 1, str(folder / "adapter")) if (folder / "adapter").exists() else None
    adapters = [adapter if i % 4 < 2 else None for i in range(len(prompts))]
    return llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)


def write_checkpoints(folder: Path, name: str, with_head: bool = True) -> None:
    """Write target, head and adapter."""
    architecture = ARCHITECTURES[name]
    if name == "Qwen2-VL":
        images.write_target(folder / "target")
        images.vllm_module()
        tiny.write_drafter(folder / "head")
        return
    target = folder / "target"
    if name.startswith("Qwen3.5"):
        model = images.write_qwen35(target, {**architecture.settings} if "MoE" in name else {})
    else:
        model = write_target(target, architecture)
    if with_head:
        write_head(folder / "head", model)
    if architecture.weights:
        write_quantised(target, target.rename(folder / "unquantised"), architecture.weights)
    if "enable_lora" in architecture.options:
        write_adapter(folder / "adapter", seed=1, modules=("q_proj", "k_proj", "v_proj", "o_proj"))


def parameter(name: str) -> Any:
    """Return the test parameter of an architecture."""
    skip = pytest.mark.skipif(name == "gpt-oss" and not TAKES_FLOAT32_SINKS, reason="vLLM serves no float32 sinks")
    fails = pytest.mark.skipif(
        name == "Granite W8A8" and torch.cpu._is_amx_tile_supported(),
        reason="with AMX vLLM's 8-bit products refuse float32",
    )
    return pytest.param(name, marks=[skip, fails, *([] if name in KINDS else [pytest.mark.wide])])


@pytest.fixture(scope="module", params=[parameter(name) for name in ARCHITECTURES])
def model(request, tmp_path_factory, start) -> tuple[str, Path, Answers]:
    """Name, folder of the checkpoints, and plain vLLM's answers."""
    folder = tmp_path_factory.mktemp("model")
    write_checkpoints(folder, request.param)
    architecture = ARCHITECTURES[request.param]
    plain = start(folder / "target", **architecture.options, **architecture.plain)
    mixed = token_ids(generate(plain, folder, PROMPTS, PARAMS))
    first = token_ids(generate(plain, folder, LONG_PROMPT, GREEDY))
    grown = [
        {"prompt_token_ids": [*prompt["prompt_token_ids"], *answer[0], 5]}
        for prompt, answer in zip(LONG_PROMPT, first, strict=True)
    ]
    second = token_ids(generate(plain, folder, grown, GREEDY))
    return request.param, folder, Answers(mixed, first, grown, second)


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, dict[str, Any]]]:
    """What was seen, by architecture and method; written beside other measurements at the end."""
    found: dict[str, dict[str, Any]] = {}
    yield found
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.parent.mkdir(exist_ok=True)
    merged = before | {name: before.get(name, {}) | methods for name, methods in found.items()}
    RESULTS.write_text(json.dumps(merged, indent=1))


def has_reference_mla(architecture: Architecture) -> bool:
    """Return whether vLLM caches no prefix and reads whole prompts: with latents, where there is no AMX."""
    return "kv_lora_rank" in architecture.settings and not torch.cpu._is_amx_tile_supported()


def start_trees(start: Callable[..., Any], name: str, folder: Path, method: str) -> Any:
    architecture, with_head = ARCHITECTURES[name], method == "eagle2"
    speculative = SPECULATIVE[method] | ({"model": str(folder / "head")} if with_head else {})
    num_blocks = architecture.num_blocks
    if "layer_types" in architecture.settings or "enable_prefix_caching" in architecture.plain:
        # Several groups; the head is one of its own.
        num_blocks += 8 if with_head else 4
    return start(
        folder / "target",
        speculative_config=speculative,
        num_gpu_blocks_override=num_blocks,
        max_num_batched_tokens=CHUNK,
        max_model_len=256,
        **architecture.options,
    )


@pytest.mark.parametrize("method", METHODS)
def test_same_as_plain(model, start, results, method):
    """Mixed requests in too few KV blocks, with chunked prefill; then a prompt that continues an answer."""
    name, folder, plain = model
    llm = start_trees(start, name, folder, method)
    before = counters(llm)
    mixed = token_ids(generate(llm, folder, PROMPTS, PARAMS))
    assert mixed[::2] == plain.mixed[::2], "greedy"
    assert mixed[1::2] == plain.mixed[1::2], "seeded"
    tau, preemptions = acceptance_length(llm, before), int(counters(llm)["preemptions"])
    assert preemptions > 0
    assert token_ids(generate(llm, folder, LONG_PROMPT, GREEDY)) == plain.first
    outputs = generate(llm, folder, plain.grown, GREEDY)
    assert token_ids(outputs) == plain.second
    cached = sum(output.num_cached_tokens for output in outputs)
    # Where block sizes differ, vLLM finds prefixes at common multiples of them only, one less beside a head.
    uncached = has_reference_mla(ARCHITECTURES[name]) or (name in FEW_PREFIXES and method == "eagle2")
    assert cached >= 32 or uncached
    chunked = sum(len(prompt["prompt_token_ids"]) > CHUNK for prompt in PROMPTS)
    assert chunked > 0
    found = {"greedy": "same", "seeded": "same", "preemptions": preemptions, "cached tokens": cached}
    results.setdefault(name, {})[method] = {**found, "chunked prompts": chunked, "tau": round(tau, 2)}
    if len(results[name]) == len(METHODS):  # accepted paths are what identity is a proof of
        assert max(one["tau"] for one in results[name].values()) > 1.05
    if method == "eagle2":
        _check_controls(llm, ARCHITECTURES[name], plain)


def _check_controls(llm: Any, architecture: Architecture, plain: Answers) -> None:
    """Without what layers add to plain attention, and without adapters, tokens must be others."""
    methods = {type(getattr(module, "quant_method", None)) for module in runner_of(llm).model.modules()}
    assert (CompressedTensorsLinearMethod in methods) == bool(architecture.weights)
    layers = runner_of(llm).compilation_config.static_forward_context.values()
    impls = [layer.impl for layer in layers if isinstance(layer, Attention)]
    if "enable_lora" in architecture.options or not all(impl.traits.adds_nothing for impl in impls):
        for impl in impls:
            impl.traits = NO_TRAITS
        assert answers_of(llm, PROMPTS, PARAMS) != plain.mixed


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path, start, name):
    architecture, layer, reason = REFUSED[name]
    write_target(tmp_path, architecture)
    with pytest.raises(ConfigError, match=rf"{layer}.* {reason}"):
        # On some CPUs vLLM before 0.32 loads convolutions in bfloat16 only.
        start(tmp_path, speculative_config=SPECULATIVE["lookup"], dtype="bfloat16")


def test_the_product_names_none():
    sources = [file.read_text() for folder in ("vllm_specplug", "proposers") for file in (ROOT / folder).rglob("*.py")]
    stems = "|".join(one.config.removesuffix("Config").removesuffix("Text") for one in ARCHITECTURES.values())
    assert not [found for source in sources if (found := re.search(rf"\b({stems})(For|Model|LM|Config)", source))]


def test_the_page_has_the_table():
    assert written() == listed(), "run this file, then: python -m tests.architecture_table"
