"""Targets with recurrent states: bits with vLLM's own operators, the proof at start, what is refused.

Tokens in float32 are compared with plain vLLM's in ``test_architectures.py``.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.kv_cache_interface import MambaSpec

from tests.doubles.architectures import ARCHITECTURES, write_head, write_target
from tests.hosts.conftest import TREE, acceptance_length, answers_of, make_prompts, runner_of
from tests.hosts.test_proof import kept_nothing, prove_again  # noqa: F401
from vllm_specplug.config import ConfigError
from vllm_specplug.core.proof import ProofFailed
from vllm_specplug.cpu import runner, state_cores, state_layers, states
from vllm_specplug.cpu.budget import ServingBudget
from vllm_specplug.cpu.state_layers import hook
from vllm_specplug.utils import proof_files

pytestmark = pytest.mark.usefixtures("expert_group")
PROVEN = True
PROMPTS = [{"prompt_token_ids": [3 + token % 147 for token in one["prompt_token_ids"]]} for one in make_prompts(8)]
NO_DRAFTS = {"speculation": False}


def params(**more: Any) -> list[SamplingParams]:
    """Every other request is sampled."""
    return [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=40, ignore_eos=True, **more)
        for i in range(len(PROMPTS))
    ]


@pytest.fixture(scope="module")
def gated_delta(checkpoints, tmp_path_factory):
    """A target with gated delta rule, and a head."""
    folder = tmp_path_factory.mktemp("hybrid")
    model = write_target(folder / "target", ARCHITECTURES["Qwen3-Next"])
    write_head(folder / "head", model)
    checkpoints |= {"gated delta": folder / "target", "gated delta head": folder / "head"}
    return "gated delta"


@pytest.fixture
def served(engine, expert_group, gated_delta):
    options = {"dtype": "bfloat16", "block_size": 32, "max_num_batched_tokens": 64}
    return engine("gated delta head", TREE, target=gated_delta, **options)


def test_trees_have_the_bits_of_plain_steps(served):
    """With chunked prompts, rows of trees, of prompts and single ones in a step, and requests that begin anew."""
    alone = [answers_of(served, [one], [how])[0] for one, how in zip(PROMPTS, params(), strict=True)]
    assert answers_of(served, PROMPTS, params()) == alone
    assert acceptance_length(served) > 1.3
    assert answers_of(served, PROMPTS, params(extra_args=NO_DRAFTS)) == alone
    mixed = [
        how if i % 3 else other
        for i, (how, other) in enumerate(zip(params(), params(extra_args=NO_DRAFTS), strict=True))
    ]
    assert answers_of(served, PROMPTS, mixed) == alone


def test_a_request_has_one_state(served):
    specs = [group.kv_cache_spec for group in runner_of(served).kv_cache_config.kv_cache_groups]
    found = [spec for spec in specs if isinstance(spec, MambaSpec)]
    assert found and all(spec.num_speculative_blocks == 0 for spec in found)


def test_a_measurement_computes_states(served, monkeypatch):
    """The measured budget knows what they cost; the requests' own stay as they are."""
    found, honest, target = [], state_cores.compute, runner_of(served)
    own = [one for layer in target.state_layers.layers.values() for one in layer.kv_cache]
    before = [one.clone() for one in own]
    monkeypatch.setattr(state_cores, "compute", lambda *args: (found.append(args), honest(*args)))
    for rows in (1, 6):
        ServingBudget._run_target(SimpleNamespace(_runner=target), rows)
        assert len(found.pop()[2].rows.rows) == rows and not found
    assert all(torch.equal(one, kept) for one, kept in zip(own, before, strict=True))


# ---- planted faults


def wrong_parents(patch):
    """Each node continues the state of the first row of the depth before it."""
    honest = runner.state_rows

    def faulty(*args):
        rows = honest(*args)
        levels = [replace(one, parents=one.parents.clamp(max=0)) for one in rows.levels]
        return replace(rows, levels=levels)

    patch.setattr(runner, "state_rows", faulty)


def parents_by_place(patch):
    """Each node continues the state of the row before it."""
    honest = runner.state_rows
    patch.setattr(
        runner,
        "state_rows",
        lambda parents, *rest: honest(torch.arange(parents.shape[1]).expand_as(parents) - 1, *rest),
    )


def not_restored(patch):
    """A tree's nodes leave their states behind as the request's own."""
    honest = state_cores.compute

    def leaving(name, own, step, core, inputs, output):
        def watched(sequences, before, after, *rest):
            core(sequences, before, after, *rest)
            if after is not own:
                for one, new in zip(own, after, strict=True):
                    one[step.blocks] = new[-1]

        honest(name, own, step, watched, inputs, output)

    patch.setattr(state_cores, "compute", leaving)


def shifted_window(patch):
    """The convolution of tree rows sees the inputs one token too late."""
    honest = states._compute_rows

    def faulty(core, sequences, before, after, *rest):
        honest(core, sequences, before if before is after else [before[0].roll(1, 1), *before[1:]], after, *rest)

    patch.setattr(states, "_compute_rows", faulty)


def not_committed(patch):
    patch.setattr(state_layers, "commit_states", lambda *_: None)


def root_not_committed(patch):
    honest = state_layers.commit_states
    patch.setattr(state_layers, "commit_states", lambda step, sources, *rest: honest(step, sources[:, 1:], *rest))


def commits_first_rows(patch):
    """As for a chain."""
    honest = state_layers.commit_states

    def faulty(step, sources, *rest):
        depths = torch.arange(sources.shape[1])
        honest(step, torch.where(sources >= 0, sources[:, :1] + depths, sources), *rest)

    patch.setattr(state_layers, "commit_states", faulty)


FAULTS = (
    wrong_parents,
    parents_by_place,
    not_restored,
    shifted_window,
    not_committed,
    root_not_committed,
    commits_first_rows,
)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_proof_finds_faults(served, kept_nothing, fault):  # noqa: F811
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        with pytest.raises(ProofFailed, match="differs from plain decoding"):
            prove_again(served)


def test_the_proof_passes(served, kept_nothing, caplog, monkeypatch, tmp_path_factory):  # noqa: F811
    monkeypatch.setattr(proof_files, "FOLDER", tmp_path_factory.mktemp("again"))  # the one at the start may be kept
    caplog.set_level("INFO")
    prove_again(served)
    assert "have the bits of plain decoding" in caplog.text


# ---- refused


def test_other_states_are_refused():
    layer = SimpleNamespace(prefix="model.layers.3.mixer")
    with pytest.raises(
        ConfigError, match=r"layer model.layers.3.mixer \(SimpleNamespace\), which has a recurrent state"
    ):
        hook("model.layers.3.mixer", layer)
