"""A token's logits have the same bits alone, batched, in trees, in chunks, after cached prefixes and preemptions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm.envs as envs
from vllm import LLM, SamplingParams
from vllm.distributed import parallel_state
from vllm.lora.request import LoRARequest

from tests.doubles.architectures import ARCHITECTURES, Architecture, write_target
from tests.doubles.quantised import FORMATS, write_quantised
from tests.hosts.conftest import acceptance_length, counters, make_prompts, needs_avx512, some
from tests.hosts.test_architectures import CHUNK, SETTINGS, write_checkpoints
from tests.hosts.test_attention_traits import known  # noqa: F401
from tests.hosts.test_quantised import ONLINE
from vllm_specplug.config import ConfigError, parse_options
from vllm_specplug.cpu import state_cores
from vllm_specplug.cpu.kernels.cpu_ops import operators
from vllm_specplug.cpu.kernels.state_scan import gated_delta_reference
from vllm_specplug.vllm.speculative_config import _check_batch_invariance

pytestmark = pytest.mark.skipif(operators() is None, reason="without the operators vLLM's kernels compute plain rows")
PROVEN = True
PROMPTS = [
    {"prompt_token_ids": [token_id % 150 for token_id in prompt["prompt_token_ids"]]}
    for prompt in make_prompts(8, seed=3, longest=100)
]
#: They are preempted together; two others go beyond the kernel's first chunk of 128 keys.
CROWD, LONG = list(range(8)), [8, 9]
PROMPTS += [{"prompt_token_ids": [3 + 7 * i % 147 for i in range(length)]} for length in (120, 190)]
#: Some prompts are read then, and some answers have begun.
STEPS_BEFORE_ABORTS = 3
#: Of many kinds of layers; the others are compared with ``-m wide``.  Cohere2 is compared in float16.
KINDS = ("Granite", "BLOOM", "gpt-oss", "Qwen3-Next", "LFM2", "DeepSeek-V3", "Granite W8A8")
KNOWING = {"method": "knowing", "budget": "fixed"}
Scored = tuple[list[int], torch.Tensor]
WIDE = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 1,
}
FINE_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
COARSE_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 3584}
#: One layer whose matrices are as large as those of real models.
REAL_SIZES = {
    "fine experts": Architecture("Qwen3MoeConfig", "", {**WIDE, **FINE_EXPERTS}),
    "coarse experts": Architecture("MixtralConfig", "", {**WIDE, **COARSE_EXPERTS}),
    "dense": Architecture("Qwen3Config", "", {**WIDE, "intermediate_size": 8192}),
}


def wide(*values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.wide)


@pytest.fixture(scope="module")
def start(engine) -> Iterator[Callable[..., Any]]:
    """``start(path, **options)``: an engine, kept to the end of the session."""

    def start(path: Path, **options: Any) -> Any:
        if parallel_state._TP is not None and parallel_state._EP is None:  # experts are spread over its one rank
            patch.setattr(parallel_state, "_EP", parallel_state._TP)
        engine.kept.append(LLM(str(path), **{**SETTINGS, **options}))
        return engine.kept[-1]

    with pytest.MonkeyPatch.context() as patch:
        yield start


def params(index: int, drafts: bool) -> SamplingParams:
    """Every other request is sampled."""
    return SamplingParams(
        temperature=0.8 * (index % 2),
        top_p=0.95 if index % 2 else 1.0,
        seed=index,
        max_tokens=24,
        ignore_eos=True,
        logprobs=-1,
        extra_args=None if drafts else {"speculation": False},
    )


class Asking:
    """Asks an engine, and returns tokens and all their logits."""

    def __init__(self, llm: Any, adapter: LoRARequest | None):
        self.llm, self._adapter = llm, adapter

    def together(self, indices: list[int], drafts: bool) -> list[Scored]:
        adapters = [self._adapter_of(index) for index in indices]
        prompts = [PROMPTS[index] for index in indices]
        asked = [params(index, drafts) for index in indices]
        outputs = self.llm.generate(prompts, asked, use_tqdm=False, lora_request=adapters)
        return [self._scored(output.outputs[0]) for output in outputs]

    def together_with_aborts(self, indices: list[int], aborted: tuple[int, ...]) -> dict[int, Scored]:
        """Ask with drafts, and abort some requests after a few steps; return the others, by index."""
        engine, found = self.llm.llm_engine, {}
        for index in indices:
            asked = params(index, drafts=True)
            engine.add_request(str(index), PROMPTS[index], asked, lora_request=self._adapter_of(index))
        for step in itertools.count():
            if not engine.has_unfinished_requests():
                return dict(sorted(found.items()))
            if step == STEPS_BEFORE_ABORTS:
                engine.abort_request([str(index) for index in aborted])
            for output in engine.step():
                if output.finished:
                    found[int(output.request_id)] = self._scored(output.outputs[0])

    def _adapter_of(self, index: int) -> LoRARequest | None:
        return self._adapter if index % 4 < 2 else None

    def alone(self, drafts: bool) -> list[Scored]:
        return [self.together([index], drafts)[0] for index in range(len(PROMPTS))]

    @staticmethod
    def _scored(sample: Any) -> Scored:
        logits = [[one[token_id].logprob for token_id in sorted(one)] for one in sample.logprobs]
        return list(sample.token_ids), torch.tensor(logits)


def num_differing(ours: list[Scored], theirs: list[Scored]) -> int:
    """How many logits differ in a bit; all after a token that differs."""
    pairs = zip(ours, theirs, strict=True)
    return sum(int((one[1] != other[1]).sum()) + 1000 * (one[0] != other[0]) for one, other in pairs)


SCORED = {"logprobs_mode": "raw_logits", "max_logprobs": -1, "speculative_config": KNOWING}


def start_knowing(start, folder, name, dtype, **options):
    architecture = ARCHITECTURES[name]
    scarce = {"num_gpu_blocks_override": architecture.num_blocks + 4, "max_num_batched_tokens": CHUNK}
    settings = {**scarce, **SCORED, "dtype": dtype, **architecture.options, **options}
    adapter = LoRARequest("adapter", 1, str(folder / "adapter")) if (folder / "adapter").exists() else None
    return Asking(start(folder / "target", **settings), adapter)


def plain_logits(asking: Asking, answers: list[list[int]]) -> list[Scored]:
    """Return the logits without drafts; ``answers`` gets the texts."""
    asking.llm.reset_prefix_cache()
    plain = asking.alone(drafts=False)
    answers[:] = [[*prompt["prompt_token_ids"], *one[0]] for prompt, one in zip(PROMPTS, plain, strict=True)]
    return plain


def check(asking: Asking, answers: list[list[int]]) -> None:
    """Compare every way of computing."""
    plain = plain_logits(asking, answers)
    before = counters(asking.llm)
    assert num_differing(asking.alone(drafts=True), plain) == 0, "alone, with drafts, from cached prefixes"
    assert acceptance_length(asking.llm, before) > 4
    asking.llm.reset_prefix_cache()
    for indices in (CROWD, LONG):
        alone = [plain[index] for index in indices]
        assert num_differing(asking.together(indices, drafts=True), alone) == 0, "at once, with drafts"
        assert num_differing(asking.together(indices, drafts=False), alone) == 0, "at once, without drafts"
    asking.llm.reset_prefix_cache()
    # Two requests end in the middle of their trees, and leave their blocks to those that wait.
    found = asking.together_with_aborts(CROWD, aborted=(0, 3))
    assert found.keys() == {*CROWD} - {0, 3}
    assert num_differing(list(found.values()), [plain[index] for index in found]) == 0, "beside aborted requests"


@pytest.mark.parametrize("name", some(ARCHITECTURES, KINDS))
def test_architectures(tmp_path, start, known, name):  # noqa: F811
    """In bfloat16, with prompts in chunks, preemptions, adapters, windows, sinks, soft caps and M-RoPE."""
    write_checkpoints(tmp_path, name, with_head=False)
    asking = start_knowing(start, tmp_path, name, "bfloat16")
    check(asking, known)
    assert int(counters(asking.llm)["preemptions"]) > 0 or "enable_lora" in ARCHITECTURES[name].options


@pytest.mark.parametrize("dtype", ["float16", wide("float32")])
def test_other_dtypes(tmp_path, start, known, dtype):  # noqa: F811
    write_checkpoints(tmp_path, "Cohere2", with_head=False)
    check(start_knowing(start, tmp_path, "Cohere2", dtype), known)


@needs_avx512
@pytest.mark.parametrize("form", ["fp8", wide("fp8_e5m2")])
def test_fp8_caches(start, known, checkpoints, form):  # noqa: F811
    options = {"kv_cache_dtype": form, "num_gpu_blocks_override": 24, "max_num_batched_tokens": CHUNK}
    check(Asking(start(checkpoints["target"], dtype="bfloat16", **options, **SCORED), None), known)


@needs_avx512
@pytest.mark.parametrize("form", ["w4a16", wide("gptq"), wide("awq"), ONLINE[0], *map(wide, ONLINE[1:])])
def test_quantised_weights(tmp_path, start, known, checkpoints, form):  # noqa: F811
    """Among the targets above is one in W8A8."""
    path, options = checkpoints["target"], {"quantization": form}
    if form not in ONLINE:
        path, options = write_quantised(tmp_path / form, path, form, lm_head=form == "w4a16"), {}
    llm = start(path, dtype="bfloat16", num_gpu_blocks_override=24, max_num_batched_tokens=CHUNK, **SCORED, **options)
    check(Asking(llm, None), known)


@needs_avx512
@pytest.mark.parametrize(
    "name, form, dtype",
    [
        ("fine experts", "", "bfloat16"),
        *(wide(name, "", "float32") for name in REAL_SIZES),
        *(wide(name, "", "bfloat16") for name in ("coarse experts", "dense")),
        *(wide("dense", form, "bfloat16") for form in FORMATS),
    ],
)
def test_real_sizes(tmp_path, start, known, name, form, dtype):  # noqa: F811
    path = tmp_path / "target"
    write_target(path, REAL_SIZES[name])
    if form:
        path = write_quantised(tmp_path / form, path, form)
    room = {"num_gpu_blocks_override": 24, "max_num_batched_tokens": CHUNK, "kv_cache_memory_bytes": 64 << 20}
    check(Asking(start(path, dtype=dtype, **room, **SCORED), None), known)


def test_chunks(tmp_path, start, known):  # noqa: F811
    write_checkpoints(tmp_path, "Granite", with_head=False)
    plain = plain_logits(start_knowing(start, tmp_path, "Granite", "bfloat16"), known)
    for chunk in (16, 512):
        other = start_knowing(start, tmp_path, "Granite", "bfloat16", max_num_batched_tokens=chunk, max_num_seqs=1)
        assert num_differing(other.alone(drafts=True), plain) == 0


def test_vllms_switch(tmp_path, start, known, monkeypatch):  # noqa: F811
    """Where vLLM would load Triton kernels, which a CPU does not run."""
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True)
    write_checkpoints(tmp_path, "Granite", with_head=False)
    check(start_knowing(start, tmp_path, "Granite", "bfloat16"), known)
    with pytest.raises(ConfigError, match="VLLM_BATCH_INVARIANT=1 needs linear_rows='all'.*found linear_rows=0"):
        start(tmp_path / "target", speculative_config={**KNOWING, "linear_rows": 0})


def test_a_runner_that_cannot_keep_it_denies_it(monkeypatch, caplog):
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True)
    with caplog.at_level("WARNING", logger="vllm_specplug"):
        _check_batch_invariance(parse_options({"method": "lookup"}), on_cpu=False, v2=True)
    assert "drafts can change texts in 16 bits" in caplog.text


@pytest.mark.wide
def test_a_prompt_in_another_arithmetic_is_found(tmp_path, start, known, monkeypatch):  # noqa: F811
    """Of the gated delta rule: a preempted request reads its answer as a prompt."""
    honest = state_cores.gated_delta

    def other(*args):
        of_prompts = len(args[0]) > len(args[-1].places)
        return (gated_delta_reference if of_prompts else honest)(*args)

    write_checkpoints(tmp_path, "Qwen3-Next", with_head=False)
    monkeypatch.setattr(state_cores, "gated_delta", other)
    asking = start_knowing(start, tmp_path, "Qwen3-Next", "float32")
    with pytest.raises(AssertionError, match="drafts"):
        check(asking, known)
