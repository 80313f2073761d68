"""Kinds of EAGLE heads on the V2 model runner: EAGLE-3, and reduced draft vocabularies."""

from __future__ import annotations

import pytest

from tests.doubles import mtp, published, tiny
from tests.hosts.conftest import WHOLE, acceptance_length, counters
from tests.v2.conftest import (
    ENGINE,
    PLAIN,
    SCARCE,
    answers,
    check_preemption,
    check_prefix_cache_hits,
    first,
    same,
    watch_rounds,
)
from vllm_specplug.proposers.eagle3.train import Eagle3Options, Eagle3Task
from vllm_specplug.proposers.training.features import load_features
from vllm_specplug.proposers.training.trainer import RunSettings, train
from vllm_specplug.utils.metrics import Counters

PROVEN = True
TREE = {"method": "eagle2", "num_speculative_tokens": 9, "draft_depth": 3, "draft_top_k": 3, **WHOLE}


@pytest.fixture(scope="module")
def eagle3(checkpoints, features, tmp_path_factory):
    """An EAGLE-3 head that knows the answers by heart, over the ids that occur."""
    out = tmp_path_factory.mktemp("heads") / "trained-eagle3"
    data = load_features(features, layers=True)
    ids = data.ids.unique()
    assert len(ids) < tiny.VOCAB
    options = Eagle3Options(epochs=80, batch_tokens=1024, lr=5e-3, draft_vocab_size=len(ids), align_steps=2)
    train(Eagle3Task(str(checkpoints["target"]), ids, options), data, str(out), RunSettings(progress=False))
    checkpoints[out.name] = out
    return out.name


@pytest.mark.interpreted
def test_eagle3(engine, prompts, plain, eagle3):
    llm = engine(eagle3, TREE, **ENGINE)
    assert same(answers(llm, prompts[:2]), first(plain, 2))
    assert acceptance_length(llm) > 1.8


def test_reduced_vocabulary(engine, prompts, plain):
    llm = engine("reduced", TREE, **ENGINE)
    assert same(answers(llm, prompts[:2]), first(plain, 2))
    assert acceptance_length(llm) > 1.2
    watch = llm.llm_engine.engine_core.engine_core.scheduler.draft_watch
    assert watch.all.drafts == watch.judged.drafts == counters(llm)["drafts"] > 0
    assert 0 < watch.all.helpful < watch.all.drafts
    metrics_file = llm.llm_engine.vllm_config.speculative_config.metrics_file
    assert Counters(metrics_file).recent() == (watch.all.drafts, watch.all.helpful)


def as_modelopt(config, tensors):
    """Another width than the target's, another name of the layer, and ids where this runner of vLLM does not look."""
    return published.as_modelopt(config, published.of_another_width(config, tensors))


@pytest.mark.parametrize(
    ("change", "least"),
    [(as_modelopt, 1.8), (published.with_two_qwen3_layers, 1.4), (published.of_the_last_state, 1.1)],
)
def test_eagle3_as_others_publish_it(engine, prompts, plain, eagle3, checkpoints, tmp_path, change, least):
    path = published.rewrite(checkpoints[eagle3], tmp_path / change.__name__, change, checkpoints["target"])
    checkpoints[path.name] = path
    llm = engine(path.name, TREE, **ENGINE)
    assert same(answers(llm, prompts[:2]), first(plain, 2))
    assert acceptance_length(llm) > least


def test_published_mtp_layers(engine, prompts, checkpoints, tmp_path):
    """MiMo: the target's own layer drafts."""
    checkpoints["mimo"] = mtp.write_with_mtp(tmp_path / "mimo", "MiMo")
    expected = answers(engine(target="mimo", **PLAIN), prompts[:2])
    llm = engine(target="mimo", speculative_config={**TREE, "method": "mtp_tree"}, **ENGINE)
    assert same(answers(llm, prompts[:2]), expected)
    assert acceptance_length(llm) > 1.2


def test_a_small_model(engine, prompts, plain, plainly, checkpoints, tmp_path, monkeypatch):
    """Then with too few blocks and with prompts in chunks; the drafter has half of the target's layers."""
    checkpoints["small"] = tiny.write_sibling(tmp_path / "small", checkpoints["target"])
    tree = {**TREE, "method": "draft_tree"}
    llm = engine("small", tree, **ENGINE)
    assert same(answers(llm, prompts), plain)
    assert acceptance_length(llm) > 1.5
    check_prefix_cache_hits(plainly, llm, prompts)
    scarce = engine("small", tree, **SCARCE)
    rounds = watch_rounds(scarce, monkeypatch)  # without a look at the device
    check_preemption(scarce, prompts, plain)
    assert len(rounds) > 4


def test_a_parallel_head(engine, prompts, plain, eagle3, checkpoints, tmp_path):
    """P-EAGLE."""
    path = published.rewrite(checkpoints[eagle3], tmp_path / "peagle", published.with_a_mask, checkpoints["target"])
    checkpoints[path.name] = path
    tree = {"method": "dflash_tree", "draft_depth": 3, "num_speculative_tokens": 9, "budget": "fixed"}
    llm = engine(path.name, {**tree, "min_node_value": 0.0}, **ENGINE)
    assert same(answers(llm, prompts[:2]), first(plain, 2))
    assert acceptance_length(llm) > 1.4
