"""The V1 runner's device path under the interpreter: token identity with the host's plain V1 runner, in float32."""

from __future__ import annotations

import pytest

from tests.hosts.conftest import TREE as DYNAMIC
from tests.hosts.conftest import acceptance_length, runner_of
from tests.v2.conftest import (
    ENGINE,
    PLAIN,
    SAMPLED,
    SCARCE,
    WITH_HISTORY,
    answers,
    asked_once,
    check_control,
    check_preemption,
    model_runner,
    same,
)
from vllm_specplug.hosts.compat import speculative_config
from vllm_specplug.hosts.v1 import gpu_runner as v1_gpu_runner
from vllm_specplug.hosts.v1.gpu_runner import TreeDeviceModelRunner
from vllm_specplug.kernels import greedy_walk

TREE = {**DYNAMIC, "num_speculative_tokens": 9, "draft_depth": 3, "draft_top_k": 3}
#: The default, given by name: it keeps these engines apart from those of the V2 runner.
OWN = {"seed": 0}


@pytest.fixture(scope="module", autouse=True)
def v1_runner():
    with model_runner("0"), pytest.MonkeyPatch.context() as patch:
        # As on a device, whose logits the C++ op cannot read: the host's sampler chooses at every depth.
        patch.setattr(greedy_walk, "is_available", lambda _logits: False)
        patch.setitem(speculative_config.WORKERS, (True, False), "tests.doubles.interpreted.InterpretedWorkerV1")
        yield


@pytest.fixture(scope="module")
def plainly(engine):
    # Another runner draws other noise.  (A block size of its own keeps this engine apart from the other modules'.)
    llm = engine(**{**PLAIN, "block_size": 64})
    return asked_once(lambda: llm)


@pytest.fixture(scope="module")
def plain(plainly, prompts):
    return plainly(prompts)


@pytest.fixture(scope="module")
def llm(engine):
    return engine("eagle", TREE, **OWN, **ENGINE)


def test_greedy_trees(prompts, plain, llm):
    assert isinstance(runner_of(llm), TreeDeviceModelRunner)
    assert same(answers(llm, prompts), plain)
    assert acceptance_length(llm) > 1.2  # else trees would not have been exercised


@pytest.mark.parametrize("params", [SAMPLED, WITH_HISTORY], ids=["free", "with history"])
def test_same_seed_same_tokens(llm, prompts, plainly, params):
    prompts = prompts[: len(params)]
    assert same(answers(llm, prompts, params), plainly(prompts, params))


def test_forced_preemption_and_chunked_prefill(engine, prompts, plain):
    check_preemption(engine("eagle", TREE, **OWN, **SCARCE), prompts, plain)


def test_a_drafter_and_lookup(engine, checkpoints, prompts, plain):
    """Host values and the device's draft in one tree."""
    drafter = {name: value for name, value in TREE.items() if name not in ("budget", "num_speculative_tokens")}
    sources = [{**drafter, "model": str(checkpoints["eagle"])}, {"method": "lookup"}]
    union = {"method": "union", "sources": sources, "num_speculative_tokens": 9, "budget": "fixed"}
    llm = engine(speculative_config=union, **OWN, **ENGINE)
    assert same(answers(llm, prompts[:2]), tuple(part[:2] for part in plain))
    assert acceptance_length(llm) > 1.2


def skip_moves(patch):
    patch.setattr(v1_gpu_runner, "move_rows", lambda *_: None)


def wrong_bit(patch):
    """Rows see the first node whether or not it is an ancestor."""
    honest = v1_gpu_runner.upload_rows

    def upload(*args):
        rows = honest(*args)
        rows.bits[:, 2:, 0] ^= 2
        return rows

    patch.setattr(v1_gpu_runner, "upload_rows", upload)


@pytest.mark.parametrize("spoil", [skip_moves, wrong_bit])
def test_controls(llm, prompts, plain, monkeypatch, spoil):
    """The negative controls: each must make the identity tests fail."""
    spoil(monkeypatch)
    check_control(llm, prompts, plain)


def test_kv_cache_groups(engine, grouped, prompts):
    expected = answers(engine(target=grouped, **{**PLAIN, "block_size": 64}), prompts)
    llm = engine("eagle", TREE, target=grouped, **OWN, **ENGINE)
    assert len(runner_of(llm)._committed) == 3
    assert same(answers(llm, prompts), expected)
    assert acceptance_length(llm) > 1.2
