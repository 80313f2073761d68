"""Medusa heads in the real engine: token identity, acceptance, trees, and every refusal before the engine starts."""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs

from tests.doubles import tiny
from tests.hosts.conftest import (
    ENGINE,
    GREEDY,
    MEDUSA,
    acceptance_length,
    answers_of,
    counters,
    make_prompts,
    needs_bytes,
    runner_of,
)
from vllm_specplug.proposers.medusa.train import MedusaTask, MedusaTraining
from vllm_specplug.proposers.training.features import load_features
from vllm_specplug.proposers.training.trainer import RunSettings, train

HEADS = 3
TRAINING = MedusaTraining(
    num_heads=HEADS, num_layers=2, epochs=120, batch_tokens=4096, lr=3e-2, draft_vocab_size=tiny.VOCAB
)


@pytest.fixture(scope="module")
def prompts():
    return make_prompts(48)


@pytest.fixture(scope="module")
def data(checkpoints, prompts, plain, tmp_path_factory):
    """Features of the target's answers to these very prompts."""
    texts = [(prompt["prompt_token_ids"], answer[0]) for prompt, answer in zip(prompts, plain, strict=True)]
    return load_features(tiny.extract_features(checkpoints["target"], texts, tmp_path_factory.mktemp("features")))


@pytest.fixture(scope="module")
def heads(checkpoints, data, tmp_path_factory):
    """Heads fitted to the answers that they will draft, so that trees are accepted often."""
    root = tmp_path_factory.mktemp("medusa")
    task = MedusaTask(str(checkpoints["target"]), torch.arange(tiny.VOCAB), TRAINING)
    train(task, data, str(root / "heads"), RunSettings(progress=False))
    checkpoints["medusa"] = root / "heads"
    return root / "heads"


def variant(checkpoints, heads, name, change=lambda tensors: None, **config):
    """A copy of the heads with other tensors and config keys, known to ``engine`` as ``name``."""
    path = heads.parent / name
    if not path.exists():
        shutil.copytree(heads, path)
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")
        settings = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(settings | config))
    checkpoints[name] = path
    return path


@pytest.fixture(scope="module")
def tau(engine, prompts, plain, heads):
    """Acceptance length of the default tree."""
    llm = engine("medusa", MEDUSA)
    before = counters(llm)
    assert answers_of(llm, prompts, GREEDY) == plain
    return acceptance_length(llm, before)


# ---- the same tokens as plain decoding


def test_batch_of_8(tau):
    assert tau > 1.5  # else trees would not have been exercised


def test_batch_of_1(engine, prompts, plain, heads):
    llm = engine("medusa", MEDUSA)
    for prompt, answer in zip(prompts[:8], plain, strict=False):
        assert answers_of(llm, [prompt], GREEDY) == [answer]


def test_dynamic_trees(engine, prompts, plain, heads):
    llm = engine("medusa", {**MEDUSA, "dynamic": True, "draft_top_k": 5})
    assert answers_of(llm, prompts, GREEDY) == plain
    assert acceptance_length(llm) > 1.3


def test_a_tree_accepts_more_than_its_chain(engine, prompts, plain, tau):
    chain = engine("medusa", {**MEDUSA, "tree": [[0], [0, 0], [0, 0, 0]]})
    assert answers_of(chain, prompts, GREEDY) == plain
    assert 1.2 < acceptance_length(chain) < tau


@pytest.mark.parametrize("draft_int8", [False, pytest.param(True, marks=needs_bytes)])
def test_own_lm_heads_equal_to_the_targets_draft_the_same(engine, checkpoints, prompts, plain, heads, tau, draft_int8):
    def add_heads(tensors):
        lm_head = load_file(checkpoints["target"] / "model.safetensors")["lm_head.weight"]
        for head in range(HEADS):
            tensors[f"{head}.{TRAINING.num_layers}.weight"] = lm_head.clone()

    variant(checkpoints, heads, "full", add_heads)
    llm = engine("full", {**MEDUSA, "draft_int8": draft_int8})
    assert all((head.quantised is not None) == draft_int8 for head in runner_of(llm).drafter.heads._lm_heads)
    assert answers_of(llm, prompts, GREEDY) == plain
    assert acceptance_length(llm) == pytest.approx(tau, rel=0.02)


def test_reduced_vocabulary_and_fewer_heads(engine, checkpoints, prompts, plain, heads):
    def reduce(tensors):
        tensors["d2t"] = torch.arange(96) // 2  # ids 0, 1, 3, 4, 6, 7, ...

    variant(checkpoints, heads, "reduced-medusa", reduce, draft_vocab_size=96)
    llm = engine("reduced-medusa", {**MEDUSA, "draft_depth": 2})
    assert answers_of(llm, prompts[:24], GREEDY) == plain[:24]
    assert acceptance_length(llm) > 1.1


def test_union_with_lookup(engine, prompts, plain, heads):
    heads = {"method": "medusa", "model": str(heads), "num_speculative_tokens": 20}
    sources = [heads, {"method": "lookup"}]
    llm = engine(speculative_config={"method": "union", "sources": sources, "budget": "fixed"})
    assert answers_of(llm, prompts[:24], GREEDY) == plain[:24]
    assert acceptance_length(llm) > 1.5


def test_forced_preemption_and_chunked_prefill(engine, prompts, heads):
    long = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    expected = answers_of(engine(block_size=32), prompts[:16], long)
    llm = engine(
        "medusa",
        MEDUSA,
        block_size=32,
        num_gpu_blocks_override=14,
        enable_prefix_caching=False,
        max_num_batched_tokens=64,
    )
    assert answers_of(llm, prompts[:16], long) == expected
    assert counters(llm)["preemptions"] > 0


def test_control_with_the_wrong_hidden_row(engine, prompts, plain, tau, monkeypatch):
    """The heads must see the last accepted row: with the root's instead, less is accepted and nothing else changes."""
    from vllm_specplug.cpu import step

    honest = step.plan_step

    def roots(walk, row_start, num_flat_rows):
        return replace(honest(walk, row_start, num_flat_rows), last_rows=row_start)

    monkeypatch.setattr(step, "plan_step", roots)
    llm = engine("medusa", {**MEDUSA, "num_speculative_tokens": 19})
    assert answers_of(llm, prompts, GREEDY) == plain
    assert acceptance_length(llm) < 0.9 * tau


# ---- refused before the engine starts


@pytest.fixture
def configure(checkpoints, heads):
    def make(model="medusa", **changes):
        speculative = {**MEDUSA, "model": str(checkpoints.get(model, model)), **changes}
        settings = {"model": str(checkpoints["target"]), **ENGINE}
        return EngineArgs(speculative_config=speculative, **settings).create_engine_config()

    return make


def test_configured(configure):
    config = configure(tree=[[0], [1], [0, 0]])
    resolved = config.speculative_config.specplug
    assert resolved.tree == ((0,), (1,), (0, 0)) and resolved.draft_depth == 2
    assert config.speculative_config.num_speculative_tokens == 3  # no more drafts are reserved than the tree has
    assert pickle.loads(pickle.dumps(config)).speculative_config.specplug == resolved
    assert configure(dynamic=True, num_speculative_tokens=255).speculative_config.num_speculative_tokens == 8 + 2 * 64


def test_the_checkpoints_own_tree_and_a_file(configure, checkpoints, heads, tmp_path):
    own = variant(checkpoints, heads, "with-tree", medusa_choices=[[0], [0, 0], [0, 0, 0], [1]])
    assert configure("with-tree").speculative_config.specplug.tree == ((0,), (0, 0), (0, 0, 0), (1,))
    cut = configure("with-tree", draft_depth=2, num_speculative_tokens=2).speculative_config.specplug
    assert cut.tree == ((0,), (0, 0))
    file = tmp_path / "tree.json"
    file.write_text('{"medusa_choices": [[2]]}')
    assert configure(str(own), tree=str(file)).speculative_config.specplug.tree == ((2,),)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tree": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]}, "needs 4 heads.*the checkpoint has 3"),
        ({"tree": [[0], [160]]}, "rank 160 .* beyond the heads' vocabulary of 160"),
        ({"tree": "nowhere.json"}, "cannot be read"),
        ({"tree": [[0]], "dynamic": True}, "leave out either tree or dynamic"),
        ({"draft_top_k": 3}, "set dynamic to true"),
        ({"min_node_value": 0.1}, "min_node_value is for dynamic trees: set dynamic to true"),
        ({"dynamic": True, "min_node_value": 0.6}, "min_node_value=0.6"),
        ({"draft_depth": 4}, r"needs more heads than .* has \(3\)"),
    ],
)
def test_bad_options(configure, changes, message):
    with pytest.raises(ValueError, match=message):
        configure(**changes)


def test_bad_checkpoints(configure, checkpoints, heads):
    variant(checkpoints, heads, "more-heads", medusa_num_heads=5)
    with pytest.raises(ValueError, match="has 5 heads .* the weights have 3"):
        configure("more-heads")
    variant(checkpoints, heads, "vocabulary", vocab_size=300, base_model_name_or_path="some/base")
    with pytest.raises(ValueError, match="vocabulary of 300, the target 160.*some/base, and they use that"):
        configure("vocabulary")

    def shrink(tensors):
        for name in list(tensors):
            tensors[name] = tensors[name][..., :32].contiguous()

    variant(checkpoints, heads, "narrow", shrink, base_model_name_or_path="some/base", hidden_size=32)
    with pytest.raises(ValueError, match="hidden size 32, the target 64.*trained on some/base.*serve that model"):
        configure("narrow")
    variant(checkpoints, heads, "halved", lambda tensors: tensors.update({"0.2.weight": torch.zeros(160, 64)}))
    with pytest.raises(ValueError, match="lacks 2 tensor.*1.2.weight, 2.2.weight.*incomplete"):
        configure("halved")
    with pytest.raises(ValueError, match="not a Medusa checkpoint"):
        configure("eagle")
