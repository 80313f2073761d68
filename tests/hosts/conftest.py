"""The real engine in this process, on tiny random checkpoints: seconds per engine."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import random
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Read by the host at import or engine start; the engine runs in this process.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_CI_ENV="1",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_CONFIGURE_LOGGING="0",  # or vLLM's loggers, and ours below them, do not reach pytest
)

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.distributed import parallel_state
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.models import registry
from vllm.v1.metrics.loggers import PrometheusStatLogger

from tests.doubles import tiny
from tests.doubles.constants import constants_of
from vllm_specplug.budget.choose import Plan
from vllm_specplug.budget.planner import PLAIN
from vllm_specplug.proposers.swift.options import SwiftOptions
from vllm_specplug.utils.environment import multiplies_bytes

needs_bytes = pytest.mark.skipif(not multiplies_bytes(), reason="this CPU does not multiply 8-bit numbers")
#: Seen on vLLM 0.32.0 with AVX2 only.  Its attention in 16 bits also differs from plain rounding by twice as much.
needs_avx512 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="without AVX-512 vLLM has no 4-bit products, 8-bit ones overflow, and attention rounds bfloat16 more often",
)

#: Trees of full size: a random drafter believes in nothing, so that its trees would be cut down to the root.
WHOLE = {"budget": "fixed", "min_node_value": 0.0, "min_level_value": 0.0}
TREE = {"method": "eagle2", "num_speculative_tokens": 20, "draft_depth": 5, "draft_top_k": 4, **WHOLE}
MEDUSA = {"method": "medusa", "num_speculative_tokens": 20, "budget": "fixed"}
#: Chains that go on whatever the model believes, and a search that never waits.
SWIFT = {
    "method": "swift",
    "budget": "fixed",
    "num_speculative_tokens": 16,
    "min_confidence": 0.05,
    "optimise_share": 1.0,
}
ENGINE = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "disable_log_stats": False,
    "seed": 0,
    "kv_cache_memory_bytes": 64 << 20,
}
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=5, top_p=0.95, max_tokens=32, ignore_eos=True)


def make_prompts(count: int, seed: int = 0, longest: int = 60) -> list[dict[str, list[int]]]:
    rng = random.Random(seed)
    lengths = [rng.randrange(2, longest) for _ in range(count)]
    return [{"prompt_token_ids": [rng.randrange(3, tiny.VOCAB) for _ in range(n)]} for n in lengths]


def some(values: Iterable[Any], kept: Container[Any]) -> list[Any]:
    """Test parameters: those that are not ``kept`` are marked ``wide``."""
    return [pytest.param(value, marks=() if value in kept else pytest.mark.wide) for value in values]


def token_ids(outputs: list[Any]) -> list[list[list[int]]]:
    return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


def answers_of(llm: Any, prompts: list[Any], *params: Any, **options: Any) -> list[list[list[int]]]:
    """Token ids of an engine's answers; the arguments are those of ``LLM.generate``."""
    return token_ids(llm.generate(prompts, *params, use_tqdm=False, **options))


def counters(llm: Any) -> Counter[str]:
    """Counts of this engine by vLLM.  (``llm.get_metrics`` reads those of the newest engine.)"""
    (prometheus,) = (one for one in llm.llm_engine.logger_manager.stat_loggers if isinstance(one, PrometheusStatLogger))
    drafts = prometheus.spec_decoding_prom
    found = {
        "preemptions": prometheus.counter_num_preempted_reqs,
        "drafts": drafts.counter_spec_decode_num_drafts,
        "draft_tokens": drafts.counter_spec_decode_num_draft_tokens,
        "accepted_tokens": drafts.counter_spec_decode_num_accepted_tokens,
    }
    return Counter({name: by_engine[0]._value.get() for name, by_engine in found.items()})


def acceptance_length(llm: Any, before: Counter[str] | None = None) -> float:
    """tau of this engine, the bonus token counted, since its counters were ``before``."""
    counts = counters(llm)
    counts.subtract(before or {})
    return 1 + counts["accepted_tokens"] / counts["drafts"]


def check_prefix_cache_hits(plain: Any, llm: Any, prompts: list[dict[str, list[int]]]) -> None:
    """The second round continues the first one's answers, whose key/value came from accepted paths; blocks of 32."""
    long = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    first = answers_of(plain, prompts, long)
    assert answers_of(llm, prompts, long) == first
    grown = [
        {"prompt_token_ids": [*prompt["prompt_token_ids"], *answer[0], 5]}
        for prompt, answer in zip(prompts, first, strict=True)
    ]
    again = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = answers_of(plain, grown, again)
    outputs = llm.generate(grown, again, use_tqdm=False)
    assert sum(output.num_cached_tokens for output in outputs) >= len(prompts) * 32
    assert token_ids(outputs) == expected


def record_drafts(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], list[int]]:
    """Drafts of a drafter that is a model of vLLM from now on, by the tokens in front of them."""
    from vllm_specplug.cpu.drafters.levels import LevelDrafter

    found: dict[tuple[int, ...], list[int]] = {}
    honest = LevelDrafter._without_unread

    def recorded(self, *args):
        draft = honest(self, *args)
        batch = self.runner.input_batch
        for place in range(batch.num_reqs):
            if not self.runner.discard_request_mask.np[place]:
                context = tuple(batch.token_ids_cpu[place, : batch.num_tokens_no_spec[place]].tolist())
                found[context] = draft.tree.token_ids[place, : draft.tree.num_rows[place]].tolist()
        return draft

    monkeypatch.setattr(LevelDrafter, "_without_unread", recorded)
    return found


def all_nodes(draft: Any, *_: Any) -> np.ndarray:
    """Select every node of a draft, as ``Budget.select``."""
    return (np.arange(draft.tree.token_ids.shape[1]) < draft.tree.num_rows.numpy()[:, None]) & (
        np.arange(draft.tree.token_ids.shape[1]) > 0
    )


def drafts_after_pauses(
    monkeypatch: pytest.MonkeyPatch, llm: Any, prompts: list[Any], params: SamplingParams
) -> tuple[list[list[list[int]]], float]:
    """Answers of an engine with a measured budget that pauses drafting for five of eight steps.

    Returns:
        The answers, and the share of the drafts that are the same as without pauses.
    """
    budget, steps = runner_of(llm).serving_budget.budget, itertools.count()
    monkeypatch.setattr(budget, "wants_model", lambda _: True)
    monkeypatch.setattr(budget, "select", all_nodes)
    monkeypatch.setattr(budget, "plan", lambda *_: Plan(budget.arms[-1]))
    always = record_drafts(monkeypatch)
    llm.generate(prompts, params, use_tqdm=False)
    sometimes = record_drafts(monkeypatch)
    monkeypatch.setattr(budget, "plan", lambda *_: Plan(budget.arms[-1] if next(steps) % 8 > 4 else PLAIN))
    answers = answers_of(llm, prompts, params)
    both = [(always[context], sometimes[context]) for context in always.keys() & sometimes.keys()]
    assert len(both) > 30
    return answers, sum(before == after for before, after in both) / len(both)


def unlucky_drafter(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every third draft of an EAGLE drafter raises from now on; the list grows by one with each."""
    from vllm_specplug.cpu.drafters import levels

    honest, calls = levels.grow_tree, []

    def sometimes(*args, **kwargs):
        calls.append(1)
        if len(calls) % 3 == 0:
            raise RuntimeError("out of luck")
        return honest(*args, **kwargs)

    monkeypatch.setattr(levels, "grow_tree", sometimes)
    return calls


@pytest.fixture(scope="session", autouse=True)
def swift_constants():
    """Chains and windows for short answers, and a search that may delay requests."""
    with constants_of(SwiftOptions, draft_depth=5, context_window=8, max_delay=1.0):
        yield


@pytest.fixture(scope="package", autouse=True)
def kept_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Cost models and proofs of the tests are not kept beside the user's."""
    from vllm_specplug.budget import saved
    from vllm_specplug.utils import proof_files

    with pytest.MonkeyPatch.context() as patch:
        for files in (saved, proof_files):
            folder = tmp_path_factory.mktemp(files.__name__.rpartition(".")[2])
            patch.setattr(files, "FOLDER", folder)
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_starts() -> Iterator[None]:
    """What each engine's start would find out anew, but is the same for a whole process, is found out once: vLLM's
    source files, and the kernels that vLLM replaces in all modules of a process.  vLLM looks at each model class in a
    new process, which takes seconds: here it does not."""
    from vllm.platforms import current_platform

    from vllm_specplug.vllm import speculative_config

    platform, replace = type(current_platform), "register_triton_kernel_overrides"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda function: function())
        patch.setattr(speculative_config, "installed_sources", functools.cache(speculative_config.installed_sources))
        if hasattr(platform, replace):  # since vLLM 0.32
            patch.setattr(platform, replace, staticmethod(functools.cache(getattr(platform, replace))))
        yield


@pytest.fixture(scope="module", autouse=True)
def proofs_at_start(request: pytest.FixtureRequest) -> Iterator[None]:
    """The proof takes nearly half of a start: only engines of modules with ``PROVEN`` have it."""
    from vllm_specplug.vllm.proof import worker

    with pytest.MonkeyPatch.context() as patch:
        if not getattr(request.module, "PROVEN", False):
            patch.setattr(worker, "prove", lambda driver: None)
        yield


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "target": tiny.write_target(root / "target"),
        # Layers 3 and 5 and MLP 2 add nothing.
        "deep": tiny.write_target(root / "deep", num_layers=8, redundant={"attention": (3, 5), "mlp": (2, 3, 5)}),
        "eagle": tiny.write_drafter(root / "eagle"),
        "reduced": tiny.write_drafter(root / "reduced", draft_vocab=96, bias=True),
        "eagle3": tiny.write_eagle3_drafter(root / "eagle3"),
    }


@pytest.fixture(scope="session")
def engine(checkpoints: dict[str, Path]) -> Iterator[Callable[..., Any]]:
    """``engine(drafter=None, tree=None, target="target", **engine_options)``: a started LLM, kept for the session.

    ``engine.kept`` takes engines made elsewhere: the end of one takes the process's parallel state with it.
    """
    from vllm import LLM

    started: dict[str, Any] = {}

    def start(
        drafter: str | None = None, tree: dict[str, Any] | None = None, target: str = "target", **options: Any
    ) -> Any:
        key = repr((drafter, tree, target, sorted(options.items())))
        if key not in started:
            settings = {**ENGINE, **options}
            if drafter is not None:
                tree = tree or {}
                defaults = {} if "method" in tree else TREE
                settings["speculative_config"] = {**defaults, **tree, "model": str(checkpoints[drafter])}
            started[key] = LLM(str(checkpoints[target]), **settings)
        return started[key]

    start.kept = []
    yield start
    with no_collections():
        start.kept.clear()
        started.clear()


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, list[int]]]:
    return make_prompts(16)


@pytest.fixture(scope="module")
def plain(engine: Callable[..., Any], prompts: list[dict[str, list[int]]]) -> list[list[list[int]]]:
    """Plain decoding's greedy answers."""
    return answers_of(engine(), prompts, GREEDY)


@pytest.fixture(autouse=True)
def own_rotary_positions() -> Iterator[None]:
    """vLLM keeps modules of rotary positions for the process, with the operators of the engine that made them."""
    yield
    rotary_embedding._ROPE_DICT.clear()


@contextmanager
def no_collections() -> Iterator[None]:
    """End engines inside: vLLM collects garbage twice at the end of each, and Python while so much is freed; each looks
    through all that the tests have made."""
    gc.disable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda *_: 0)
        yield
    gc.enable()


def runner_of(llm: Any) -> Any:
    """The model runner of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


@pytest.fixture
def expert_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dense engine of this process has made no group for experts; one of a single rank is like any other."""
    if parallel_state.model_parallel_is_initialized() and parallel_state._EP is None:
        monkeypatch.setattr(parallel_state, "_EP", parallel_state.get_tp_group())


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every walk of a tree in this test."""
    from vllm_specplug.cpu.walk import SampledWalk

    counts: list[int] = []
    honest = SampledWalk.__call__

    def counted(self, tree, *args):
        walk, output = honest(self, tree, *args)
        counts.extend(walk.num_emitted[tree.num_rows > 1].tolist())
        return walk, output

    monkeypatch.setattr(SampledWalk, "__call__", counted)
    return counts
