"""Targets with recurrent states on the V2 runner: tokens of plain vLLM, the proof at start.

Our kernels run in Triton's interpreter.  Prompts, and rows without a tree, are vLLM's own code: of Mamba-2 for CPUs, of
the gated delta rule for CUDA with plain torch in the place of kernels (``doubles/gated_delta_on_gpu.py``).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from vllm import SamplingParams
from vllm.model_executor.layers.mamba import mamba_mixer2
from vllm.v1.kv_cache_interface import MambaSpec

from tests.doubles.architectures import ARCHITECTURES, write_head, write_target
from tests.doubles.gated_delta_on_gpu import as_on_gpus
from tests.hosts.conftest import TREE as DYNAMIC
from tests.hosts.conftest import acceptance_length, counters, expert_group, make_prompts, runner_of  # noqa: F401
from tests.v2.conftest import answers, same, watch_rounds
from tests.v2.test_proof import kept_nothing, prove_again  # noqa: F401
from vllm_specplug.core.proof import ProofFailed
from vllm_specplug.gpu import state_layers, states

PROVEN = True
TREE = {**DYNAMIC, "num_speculative_tokens": 6, "draft_depth": 3, "draft_top_k": 2}
LOOKUP = {"method": "lookup", "num_speculative_tokens": 6, "budget": "fixed"}
#: Prompts are read in chunks.
ENGINE = {"block_size": 32, "enable_prefix_caching": False, "max_num_batched_tokens": 40, "max_num_seqs": 3}
PROMPTS = [{"prompt_token_ids": [3 + token % 147 for token in one["prompt_token_ids"]]} for one in make_prompts(4)]


def make_params(**more):
    """Greedy and seeded; the last one has no drafts."""
    more |= {"ignore_eos": True, "logprobs": 0}
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=10, **more) for i in range(3)]
    return [*params, SamplingParams(temperature=0, max_tokens=16, extra_args={"speculation": False}, **more)]


PARAMS = make_params()


@pytest.fixture(scope="module")
def hybrid(checkpoints, tmp_path_factory):
    """A target with Mamba-2 beside attention, and a head."""
    folder = tmp_path_factory.mktemp("hybrid")
    write_head(folder / "head", write_target(folder / "target", ARCHITECTURES["Falcon-H1"]))
    checkpoints |= {"hybrid": folder / "target", "hybrid head": folder / "head"}
    return "hybrid"


@pytest.fixture(scope="module")
def gated_delta(checkpoints, tmp_path_factory):
    """A target with the gated delta rule and experts, and a head."""
    folder = tmp_path_factory.mktemp("gated delta")
    known = ARCHITECTURES["Qwen3-Next"]
    small = {"linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_num_value_heads": 2, "head_dim": 32}
    write_head(folder / "head", write_target(folder / "target", replace(known, settings={**known.settings, **small})))
    checkpoints |= {"gated delta": folder / "target", "gated delta head": folder / "head"}
    with pytest.MonkeyPatch.context() as patch:
        as_on_gpus(patch)
        yield "gated delta"


@pytest.fixture
def served(engine, hybrid):
    return engine("hybrid head", TREE, target=hybrid, **ENGINE)


@pytest.fixture(scope="module")
def expected(engine, hybrid):
    return answers(engine(target=hybrid, **ENGINE), PROMPTS, PARAMS)


def test_tokens(served, expected, monkeypatch):
    """No value is read back between the rows and the next drafts."""
    rounds = watch_rounds(served, monkeypatch)
    assert same(answers(served, PROMPTS, PARAMS), expected)
    assert acceptance_length(served) > 1.2 and len(rounds) > 4


@pytest.mark.wide
def test_tokens_with_lookup(engine, hybrid):
    """Answers of two tokens, so that they repeat; a request is preempted."""
    params = make_params(logit_bias={7: 100.0, 11: 100.0})
    llm = engine(target=hybrid, speculative_config=LOOKUP, max_model_len=128, num_gpu_blocks_override=7, **ENGINE)
    assert same(answers(llm, PROMPTS, params), answers(engine(target=hybrid, **ENGINE), PROMPTS, params))
    assert acceptance_length(llm) > 1.2 and counters(llm)["preemptions"]


@pytest.mark.wide
def test_cuda_graphs(graph_engine, hybrid, expected, monkeypatch):
    """Trees from recorded graphs."""
    monkeypatch.setattr(torch.ops.vllm, "mamba_mixer2", mamba_mixer2.mamba_mixer2)  # or the stand-in sees one operator
    llm = graph_engine("hybrid head", TREE, target=hybrid, **ENGINE)
    assert same(answers(llm, PROMPTS[:2], PARAMS[:2]), [found[:2] for found in expected])


@pytest.mark.wide
@pytest.mark.usefixtures("expert_group")
def test_gated_delta_rule(engine, gated_delta):
    expected = answers(engine(target=gated_delta, **ENGINE), PROMPTS, PARAMS)
    llm = engine("gated delta head", TREE, target=gated_delta, **ENGINE)
    assert same(answers(llm, PROMPTS, PARAMS), expected)
    assert acceptance_length(llm) > 1.1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states.StateLayers, "commit", lambda *_: None)
        assert not same(answers(llm, PROMPTS, PARAMS), expected)


@pytest.mark.wide
def test_short_convolutions(engine, checkpoints, tmp_path_factory):
    folder, known = tmp_path_factory.mktemp("short convolutions"), ARCHITECTURES["LFM2"]
    write_head(folder / "head", write_target(folder / "target", known))
    checkpoints |= {"short": folder / "target", "short head": folder / "head"}
    options = {**ENGINE, **known.options}
    expected = answers(engine(target="short", **options), PROMPTS, PARAMS)
    llm = engine("short head", TREE, target="short", **options)
    assert same(answers(llm, PROMPTS, PARAMS), expected)
    assert acceptance_length(llm) > 1  # the head is a poor one, see the table in docs/support.md
    with pytest.MonkeyPatch.context() as patch:
        not_committed(patch)
        assert not same(answers(llm, PROMPTS, PARAMS), expected)


def test_a_request_has_one_state(served):
    specs = [group.kv_cache_spec for group in runner_of(served).kv_cache_config.kv_cache_groups]
    assert {spec.num_speculative_blocks for spec in specs if isinstance(spec, MambaSpec)} == {0}


# ---- planted faults


def wrong_parents(patch):
    """Each node continues the state of the row before it."""
    honest = state_layers.mamba2_tree

    def faulty(trees, *args, **named):
        rows = torch.arange(trees.bits.shape[1])
        if "source_rows" not in named:  # not in the commit
            trees = replace(trees, bits=((2 << rows) - 1).view(1, -1, 1).expand_as(trees.bits).contiguous())
        honest(trees, *args, **named)

    patch.setattr(state_layers, "mamba2_tree", faulty)


def not_restored(patch):
    """The root leaves its state behind as the request's own."""
    honest = state_layers.Mamba2TreeLayer.compute

    def faulty(self, trees, *args):
        honest(self, trees, *args)
        self.commit(trees, trees.start.long().unsqueeze(1))

    patch.setattr(state_layers.Mamba2TreeLayer, "compute", faulty)


def shifted_window(patch):
    """The convolution sees the inputs before the root one token too late."""
    honest = state_layers.conv_tree
    patch.setattr(
        state_layers,
        "conv_tree",
        lambda trees, inputs, windows, *rest, **named: honest(trees, inputs, windows.roll(1, 2), *rest, **named),
    )


def not_committed(patch):
    patch.setattr(states.StateLayers, "commit", lambda *_: None)


def commits_first_rows(patch):
    """As for a chain."""
    honest = states.StateLayers.commit

    def faulty(self, sources):
        honest(self, torch.where(sources >= 0, sources[:, :1] + torch.arange(sources.shape[1]), sources))

    patch.setattr(states.StateLayers, "commit", faulty)


FAULTS = (wrong_parents, not_committed, not_restored, shifted_window, commits_first_rows)


@pytest.mark.wide
@pytest.mark.parametrize("fault", FAULTS)
def test_the_proof_finds_faults(served, kept_nothing, fault):  # noqa: F811
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        with pytest.raises(ProofFailed, match="differs by .* from plain decoding"):
            prove_again(served)


def test_the_proof_passes(served, kept_nothing, caplog):  # noqa: F811
    caplog.set_level("INFO")
    prove_again(served)
    assert "proof at start: passed" in caplog.text
