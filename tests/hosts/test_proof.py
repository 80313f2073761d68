"""The proof at start in the real engine: it passes, it catches planted faults, and it leaves nothing behind."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.model_executor.layers.attention import Attention

from tests.hosts.conftest import ENGINE, TREE, answers_of, counters, make_prompts, runner_of
from tests.hosts.test_attention_traits import CHUNK, WINDOW, write_target
from vllm_specplug.core.layout import lay_out
from vllm_specplug.core.proof import ProofFailed, Row
from vllm_specplug.cpu import attention, step
from vllm_specplug.cpu.attention import TreeAttentionImpl
from vllm_specplug.types import TreeLayout
from vllm_specplug.utils import proof_files
from vllm_specplug.utils.files import kept_path, kept_paths
from vllm_specplug.utils.metrics import COUNTERS, Counters
from vllm_specplug.vllm.proof import worker
from vllm_specplug.vllm.proof.driver import DriverV1
from vllm_specplug.vllm.proof.proof import Proof
from vllm_specplug.vllm.proof.worker import facts_of, prove

PROVEN = True
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture
def kept_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(proof_files, "FOLDER", tmp_path)


def prove_again(llm: Any) -> None:
    prove(DriverV1(llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker))


@pytest.fixture(scope="module")
def proven(engine):
    return engine(
        "eagle", TREE, max_num_seqs=6, dtype="bfloat16"
    )  # not shared with other tests: the proof writes to its cache


# ---- faults, planted in the runner


def changed_layout(monkeypatch: pytest.MonkeyPatch, change: Callable[..., dict[str, torch.Tensor]]) -> None:
    def faulty(tree, context_lens, max_depth=None):
        honest = lay_out(tree, context_lens, max_depth)
        return TreeLayout(**{**vars(honest), **change(tree, context_lens, honest)})

    monkeypatch.setattr(step, "lay_out", faulty)


def mask_off_by_one_level(monkeypatch):
    def without_parents(tree, context_lens, honest):
        parents = torch.nn.functional.one_hot(tree.parents.clamp(min=0), honest.mask.shape[2]).bool()
        return {"mask": honest.mask & ~(parents & (tree.parents >= 0).unsqueeze(2))}

    changed_layout(monkeypatch, without_parents)


def mask_of_the_row_before(monkeypatch):
    def shifted(tree, context_lens, honest):
        width = honest.mask.shape[2]
        return {"mask": torch.cat([honest.mask[:, :1], honest.mask[:, :-1]], 1) | torch.eye(width, dtype=torch.bool)}

    changed_layout(monkeypatch, shifted)


def positions_not_moved(monkeypatch):
    def flat(tree, context_lens, honest):
        return {"positions": context_lens.long().unsqueeze(1) + torch.arange(honest.positions.shape[1])}

    changed_layout(monkeypatch, flat)


def a_row_not_moved(monkeypatch):
    honest = step.write_accepted

    def write_accepted(rows, plan, *args):
        sources = plan.source_rows.clone()
        last = int((sources[0] >= 0).sum()) - 1
        sources[0, last] = -1
        honest(rows, replace(plan, source_rows=sources), *args)

    monkeypatch.setattr(step, "write_accepted", write_accepted)


FAULTS = (mask_off_by_one_level, mask_of_the_row_before, positions_not_moved, a_row_not_moved)


def test_it_passes_and_leaves_nothing_behind(engine, proven, kept_nothing, monkeypatch):
    served = answers_of(proven, make_prompts(4), GREEDY)
    before, found = counters(proven), vars(runner_of(proven)).keys() - {"_model_forward"}
    said = Counters(runner_of(proven).speculative_config.metrics_file).values()
    state, compute_logits = torch.get_rng_state(), runner_of(proven).model.compute_logits
    prove_again(proven)
    (result,) = proof_files.kept()
    assert result["fault"] == "" and result["in_bits"] == 1 and result["difference"] == 0 < result["control"]
    assert torch.equal(torch.get_rng_state(), state)
    assert counters(proven) == before and vars(runner_of(proven)).keys() - {"_model_forward"} == found
    assert Counters(runner_of(proven).speculative_config.metrics_file).values() == said
    assert not any(name.startswith("specplug") for name in runner_of(proven).requests)
    assert runner_of(proven).model.compute_logits == compute_logits
    proven.reset_prefix_cache()
    assert answers_of(proven, make_prompts(4), GREEDY) == served


def test_it_is_kept(proven, kept_nothing, monkeypatch):
    said = []
    monkeypatch.setattr(worker.logger, "info_once", lambda text, *args: said.append(text % args))
    prove_again(proven)
    mask_off_by_one_level(monkeypatch)
    prove_again(proven)  # a proof that has passed is not made again
    made, kept = said
    assert re.search(r"passed in .* s: \d+ rows of trees have the bits of plain decoding", made)
    assert re.search(r"passed on \d{4}-", kept)
    (path,) = kept_paths(proof_files.FOLDER)
    path.unlink()
    for _ in range(2):  # one that has failed is
        with pytest.raises(ProofFailed):
            prove_again(proven)


def other_weights(runner, monkeypatch):
    weight = next(runner.get_model().parameters())
    monkeypatch.setattr(weight, "data", weight.data + 1)


def other_attention(runner, monkeypatch):
    layers = runner.compilation_config.static_forward_context.values()
    monkeypatch.setattr(next(layer for layer in layers if isinstance(layer, Attention)), "impl", object())


OTHER = {
    "weights": other_weights,
    "vllm": lambda _, monkeypatch: monkeypatch.setattr(worker, "find_vllm", lambda: ("vllm", "99.0")),
    "plugin": lambda _, monkeypatch: monkeypatch.setattr(worker, "source_digest", lambda: "other"),
    "attention": other_attention,
}


@pytest.mark.parametrize("name", OTHER)
def test_it_is_made_again_for_what_it_depends_on(proven, monkeypatch, name):
    facts = facts_of(runner_of(proven))
    assert facts_of(runner_of(proven)) == facts
    OTHER[name](runner_of(proven), monkeypatch)
    others = facts_of(runner_of(proven))
    assert {key for key in facts if others[key] != facts[key]} == {name}
    assert kept_path(proof_files.FOLDER, others) != kept_path(proof_files.FOLDER, facts)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(proven, kept_nothing, monkeypatch, fault):
    fault(monkeypatch)
    with pytest.raises(ProofFailed, match=r"differs from plain decoding in \d+ of \d+ logits"):
        prove_again(proven)
    assert proof_files.kept()[0]["fault"]


def test_kernels_that_do_not_keep_bits_are_judged_by_a_bound(proven, kept_nothing, monkeypatch):
    """Plain rows by vLLM's attention, whose sums depend on the batch; if the user asks for bits, that is refused."""
    monkeypatch.setattr(TreeAttentionImpl, "_is_ours", lambda *_: False)
    monkeypatch.setattr(Row, "num_differing", lambda self: 1)
    prove_again(proven)
    (result,) = proof_files.kept()
    assert result["in_bits"] == 0 and result["difference"] <= result["bound"] < result["control"]
    monkeypatch.setattr(worker.envs, "VLLM_BATCH_INVARIANT", True)  # another file is looked for
    with pytest.raises(ProofFailed, match="gave other bits in another batch, and .* or unset VLLM_BATCH"):
        prove_again(proven)


#: Targets whose attention is more than plain softmax, and what may be wrong about it in our kernel.
LEFT_OUT = {
    "sliding window": [{"window": WINDOW + 1}, {"window": WINDOW - 1}, {"window": 0}],
    "alternating windows, soft caps": [{"soft_cap": 0.0}, {"window": WINDOW + 1}],
    "sinks": [{"sinks": None}],
    "ALiBi": [{"alibi_slopes": None}],
    "chunks": [{"local": CHUNK + 1}, {"local": CHUNK - 1}, {"local": 0}],
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_traits_that_are_wrong_are_caught(engine, expert_group, tmp_path, monkeypatch, name):
    kept = tmp_path / "kept"
    monkeypatch.setattr(proof_files, "FOLDER", kept)
    target = write_target(tmp_path / "target", name)
    options = {**ENGINE, "max_num_seqs": 3, "dtype": "bfloat16"}
    llm = LLM(str(target), **options, speculative_config={"method": "lookup"})
    engine.kept.append(llm)
    assert proof_files.kept()[0]["fault"] == ""
    shutil.rmtree(kept)
    layers = runner_of(llm).compilation_config.static_forward_context.values()
    impls = [layer.impl for layer in layers if isinstance(layer, Attention)]
    for fault in LEFT_OUT[name]:
        with monkeypatch.context() as patch:
            for impl in impls:
                if all(getattr(impl.traits, name) for name in {"window", "local"} & fault.keys()):
                    patch.setattr(impl, "traits", replace(impl.traits, **fault))
            with pytest.raises(ProofFailed, match="attention of .* differs from vLLM's by"):
                prove_again(llm)


def test_a_control_with_its_mask_shows_that_the_proof_has_no_power(proven, kept_nothing, monkeypatch):
    monkeypatch.setattr(DriverV1, "mask_off", lambda self: nullcontext())
    with pytest.raises(ProofFailed, match="no power"):
        prove_again(proven)


def test_an_engine_without_proof_does_not_start(checkpoints, kept_nothing, monkeypatch):
    mask_off_by_one_level(monkeypatch)
    with pytest.raises(ProofFailed, match='at depth .*"on_failure": "plain"'):
        LLM(str(checkpoints["target"]), **ENGINE, speculative_config={"method": "lookup"})


@pytest.mark.parametrize("on_failure", ["refuse", "plain"])
def test_a_model_that_fails_without_trees(proven, kept_nothing, monkeypatch, on_failure):
    """As a GPTQ model does where vLLM lacks an operator: plain decoding would fail with the first request."""

    def fail(*_args, **_kwargs):
        raise AttributeError("there is no such operator")

    monkeypatch.setattr(Proof, "_read", fail)
    options = runner_of(proven).speculative_config.specplug
    monkeypatch.setattr(runner_of(proven).speculative_config, "specplug", replace(options, on_failure=on_failure))
    with pytest.raises(ProofFailed, match="step without trees raised AttributeError: there is no .* cannot run it on"):
        prove_again(proven)


def test_or_it_decodes_plainly(engine, checkpoints, kept_nothing, monkeypatch):
    prompts = make_prompts(4)
    expected = answers_of(engine(), prompts, GREEDY)
    mask_off_by_one_level(monkeypatch)
    config = {**TREE, "model": str(checkpoints["eagle"]), "on_failure": "plain"}
    llm = LLM(str(checkpoints["target"]), **ENGINE, speculative_config=config)
    engine.kept.append(llm)
    with monkeypatch.context() as patch:  # the fault may be that of our kernel
        patch.setattr(attention, "causal_attention", lambda *_: pytest.fail("our kernel computes plain rows"))
        assert answers_of(llm, prompts, GREEDY) == expected
    assert counters(llm)["drafts"] == 0
    values = Counters(runner_of(llm).speculative_config.metrics_file).values()
    counted = [counter.name for counter, value in zip(COUNTERS, values, strict=True) if value]
    assert counted == ["specplug:proof_failures"]
