"""The V2 model runner and the Triton kernels on a CPU, under Triton's interpreter; on a GPU as they are.

Run alone (``python -m pytest tests/v2``): the interpreter is chosen when triton is imported, and the host asks once
whether there is a Triton backend.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys

import pytest
import torch

if "vllm" in sys.modules or ("triton" in sys.modules and "triton.language" in sys.modules):
    pytest.exit("tests/v2 needs a process of its own: python -m pytest tests/v2", returncode=4)

if torch.cuda.is_available():
    # The host's Triton attention would round float32 to TF32, ours does not.
    os.environ["TRITON_F32_DEFAULT"] = "ieee"
else:
    from tests.doubles.bounds import check_addresses
    from tests.doubles.interpreter import shuffle_programs, use_interpreter

    use_interpreter()
    check_addresses()
    shuffle_programs()
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # its compiler asks triton's driver, of which there is only the name
os.environ.update(
    VLLM_USE_V2_MODEL_RUNNER="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_CI_ENV="1",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="ERROR",
)

from vllm import SamplingParams, envs
from vllm.platforms import current_platform
from vllm.v1.sample.ops import topk_topp_sampler

from tests.doubles import interpreted, oracle_kernels, tiny  # noqa: F401
from tests.doubles.bounds import Outside, thorough
from tests.doubles.cuda_graphs import Graph, capture_in_engines, use_graphs
from tests.doubles.no_syncs import NoLookAtTheDevice
from tests.hosts.conftest import (  # noqa: F401
    acceptance_length,
    checkpoints,
    engine,
    kept_files,
    make_prompts,
    proofs_at_start,
    quick_starts,
    runner_of,
    token_ids,
)

#: With logprobs: an error in the key/value shows there long before it changes a token.
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
SAMPLED = [
    SamplingParams(temperature=0.8, seed=1, max_tokens=6, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.2, seed=2, top_k=9, top_p=0.9, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=3, min_p=0.05, logit_bias={7: 2.0}, max_tokens=6, min_tokens=3),
]
#: What depends on the tokens before: sampled depth by depth.
WITH_HISTORY = [
    SamplingParams(temperature=0.9, seed=4, repetition_penalty=1.4, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0, frequency_penalty=0.8, presence_penalty=0.5, max_tokens=6, ignore_eos=True),
]
#: Engines stay for the session, and the host asks for so much of a GPU's memory to be free before each.
_SHARED = {"gpu_memory_utilization": 0.1} if torch.cuda.is_available() else {}
#: Blocks of 16 tokens, so that contexts span several and requests are short: the interpreter is slow.
ENGINE = {"block_size": 16, **_SHARED}
#: The host's CPU attention takes no smaller ones.
PLAIN = {"block_size": 32, **_SHARED}
#: Too few blocks for the requests, and too few tokens for their prompts.
SCARCE = {"max_model_len": 96, "num_gpu_blocks_override": 7, "max_num_batched_tokens": 24, "max_num_seqs": 3, **ENGINE}


def pytest_collection_modifyitems(items):
    """Tests without an engine first: beside engines, which have millions of objects, ``thorough`` checks take long."""
    items.sort(key=lambda item: "engine" in getattr(item, "fixturenames", ()))


def compute_in_torch(patch):
    """Plain torch for vLLM's top-k/top-p kernel, which the interpreter refuses, and for a step's slowest kernels."""
    if not torch.cuda.is_available():
        patch.setattr(topk_topp_sampler, "HAS_TRITON", False)
        oracle_kernels.use(patch, oracle_kernels.ORACLE)


@pytest.fixture(scope="session", autouse=True)
def oracle():
    """``compute_in_torch``; tests marked ``interpreted`` have the kernels of a step."""
    with pytest.MonkeyPatch.context() as patch:
        compute_in_torch(patch)
        yield


@pytest.fixture(autouse=True)
def bounds(request):
    """No kernel leaves its tensors, also where a drafter's errors are caught."""
    with thorough("engine" not in request.fixturenames):
        yield
    found, Outside.found[:] = Outside.found[:], []
    assert not found


@pytest.fixture(autouse=True)
def kernels(request, monkeypatch):
    if request.node.get_closest_marker("interpreted") is not None:
        oracle_kernels.use(monkeypatch, oracle_kernels.KERNELS)


@pytest.fixture(scope="session")
def prompts():
    return make_prompts(3, longest=40)


def asked_once(make_engine):
    """``ask(prompts, params)``: the answers of an engine, each asked for once."""
    known = {}

    def ask(prompts, params=GREEDY):
        key = repr((prompts, params))
        if key not in known:
            known[key] = answers(make_engine(), prompts, params)
        return known[key]

    return ask


@pytest.fixture(scope="session")
def plainly(engine):  # noqa: F811
    """Plain decoding's answers."""
    return asked_once(lambda: engine(**PLAIN))


@pytest.fixture(scope="session")
def plain(plainly, prompts):
    return plainly(prompts)


@pytest.fixture(scope="session")
def features(checkpoints, prompts, plain, tmp_path_factory):  # noqa: F811
    """Files of the target's features over those answers."""
    from vllm_specplug.proposers.eagle3.head import layer_ids

    texts = [(one["prompt_token_ids"], out[0]) for one, out in zip(prompts, plain[0], strict=True)]
    folder, layers = tmp_path_factory.mktemp("features"), layer_ids({"num_hidden_layers": 2})
    return tiny.extract_features(checkpoints["target"], texts, folder, layers)


@pytest.fixture(scope="session")
def heads(checkpoints, features, tmp_path_factory):  # noqa: F811
    """Medusa heads that know the answers by heart: the name of their checkpoint."""
    checkpoints["medusa"] = tiny.write_medusa(
        tmp_path_factory.mktemp("heads") / "medusa", checkpoints["target"], features
    )
    return "medusa"


@pytest.fixture(scope="session")
def grouped(checkpoints, tmp_path_factory):  # noqa: F811
    """A target with three KV cache groups, the drafter's layer in one of them; no context is longer than a window."""
    checkpoints["grouped"] = tiny.write_target_with_windows(tmp_path_factory.mktemp("grouped") / "target", 512)
    return "grouped"


def answers(llm, prompts, params=GREEDY):
    """Token ids of every answer, and the log-probability of every token."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    logprobs = [
        [step[token].logprob for step, token in zip(one.logprobs, one.token_ids, strict=True)]
        for one in (output.outputs[0] for output in outputs)
        if one.logprobs is not None
    ]
    return token_ids(outputs), logprobs


def first(found, count):
    """Those answers of ``found`` that are to the first prompts."""
    return tuple(part[:count] for part in found)


def same(ours, theirs):
    """Equal tokens, and logprobs that differ by rounding only."""
    return ours[0] == theirs[0] and all(
        mine == pytest.approx(his, abs=1e-4) for mine, his in zip(ours[1], theirs[1], strict=True)
    )


def check_prefix_cache_hits(plainly, llm, prompts):
    """Requests that go on behind their answers, on blocks whose key/value came from accepted paths."""
    first, _ = plainly(prompts)
    prompts = prompts[:2]
    assert answers(llm, prompts)[0] == first[:2]
    grown = [
        {"prompt_token_ids": [*prompt["prompt_token_ids"], *answer[0], 5]}
        for prompt, answer in zip(prompts, first, strict=False)
    ]
    outputs = llm.generate(grown, GREEDY, use_tqdm=False)
    assert sum(output.num_cached_tokens for output in outputs) >= 2 * 16
    assert token_ids(outputs) == plainly(grown)[0]


def check_preemption(llm, prompts, expected):
    """The same answers from an engine that is ``SCARCE``."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempted = []
    preempt = scheduler._preempt_request
    scheduler._preempt_request = lambda *args, **kwargs: (preempted.append(args), preempt(*args, **kwargs))[1]
    try:
        assert same(answers(llm, prompts), expected)
    finally:
        scheduler._preempt_request = preempt
    assert preempted


def check_control(llm, prompts, expected):
    """Another answer to the first prompt from an engine that was spoiled; what it computed wrongly is not kept."""
    llm.reset_prefix_cache()
    try:
        assert not same(answers(llm, prompts[:1]), first(expected, 1))
    finally:
        llm.reset_prefix_cache()


@contextlib.contextmanager
def model_runner(version):
    """The host's V1 or V2 runner inside (None: as it likes); it asks whenever it needs to know, and keeps answers."""
    name = "VLLM_USE_V2_MODEL_RUNNER"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(name) if version is None else patch.setenv(name, version)
        envs.disable_envs_cache()
        yield
    envs.disable_envs_cache()


@pytest.fixture
def graph_engine(engine, monkeypatch):  # noqa: F811
    """``engine`` that captures CUDA graphs; without a GPU, stand-ins for them, and those must be replayed."""
    if torch.cuda.is_available():
        yield functools.partial(engine, enforce_eager=False)
        return
    oracle_kernels.use(monkeypatch, oracle_kernels.KERNELS)
    use_graphs(monkeypatch)
    capture_in_engines(monkeypatch)
    before = Graph.replays
    yield functools.partial(engine, enforce_eager=False)
    assert Graph.replays > before


@pytest.fixture
def asynchronous(monkeypatch):
    """The host never schedules asynchronously on a CPU; it can."""
    platform = type(current_platform)
    honest = platform.check_and_update_config

    def restore(config):
        honest(config)
        config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(platform, "check_and_update_config", staticmethod(restore))


def watch_rounds(llm, monkeypatch):
    """Verification and drafting look at no value from now on; the list grows by one with each of them."""
    runner, rounds = runner_of(llm), []

    def watched(function):
        @functools.wraps(function)  # with its attributes
        def call(*args, **kwargs):
            rounds.append(function)
            with NoLookAtTheDevice():
                return function(*args, **kwargs)

        return call

    monkeypatch.setattr(runner, "rejection_sampler", watched(runner.rejection_sampler))
    for key, growth in runner.speculator._growths.items():
        monkeypatch.setitem(runner.speculator._growths, key, watched(growth))
    return rounds


def check_greedy(llm, speculator, prompts, expected, acceptance, monkeypatch):
    """Plain answers from this speculator, with accepted drafts; no value is read back between rows and next drafts."""
    assert isinstance(runner_of(llm).speculator, speculator)
    # Else vLLM would choose its V1 runner where nothing else is asked for.
    assert llm.llm_engine.vllm_config._get_v2_model_runner_unsupported_features() == []
    rounds = watch_rounds(llm, monkeypatch)
    assert same(answers(llm, prompts), expected)
    assert len(rounds) > 4
    assert acceptance_length(llm) > acceptance
