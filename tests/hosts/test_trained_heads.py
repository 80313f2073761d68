"""Heads from our trainers in the real engine: as many drafts are accepted as offline, and no token changes."""

from __future__ import annotations

import pytest
import torch

from tests.doubles import published, tiny
from tests.hosts.conftest import GREEDY, SEEDED, TREE, WHOLE, acceptance_length, answers_of, counters
from vllm_specplug.cpu.drafters import best_first
from vllm_specplug.proposers.eagle3 import train as eagle3
from vllm_specplug.proposers.eagle3.head import layer_ids
from vllm_specplug.proposers.hass.train import HassTrainOptions
from vllm_specplug.proposers.training import eagle, features
from vllm_specplug.proposers.training.evaluate import chain_acceptance
from vllm_specplug.proposers.training.trainer import RunSettings, train

CHAIN = {"draft_top_k": 1, "draft_depth": 4, "num_speculative_tokens": 4, **WHOLE}
IDS = torch.arange(tiny.VOCAB)
SMALL = {"epochs": 60, "batch_tokens": 1024, "lr": 5e-3, "draft_vocab_size": tiny.VOCAB, "align_steps": 2}


@pytest.fixture(scope="module")
def data(checkpoints, prompts, plain, tmp_path_factory):
    """Features of the very answers that are drafted later: a head that knows them by heart accepts much."""
    texts = [(prompt["prompt_token_ids"], answer[0]) for prompt, answer in zip(prompts, plain, strict=True)]
    layers = layer_ids({"num_hidden_layers": 2})
    return tiny.extract_features(checkpoints["target"], texts, tmp_path_factory.mktemp("features"), layers)


def trained(kind, checkpoints, files, out) -> float:
    """Train a head, register its checkpoint as `out.name`, and return its offline tau."""
    target = str(checkpoints["target"])
    data = features.load_features(files, layers=kind == "eagle3")
    _, embedding, lm_head = features.target_head(target)
    if kind == "eagle":
        train(eagle.EagleTask(target, IDS, HassTrainOptions(**SMALL)), data, str(out), RunSettings(progress=False))
        head, ids = eagle.load_trained(str(out))
    else:
        train(
            eagle3.Eagle3Task(target, IDS, eagle3.Eagle3Options(**SMALL)), data, str(out), RunSettings(progress=False)
        )
        head, ids = eagle3.load_trained(str(out))
        lm_head = head.lm_head.weight.detach()
    checkpoints[out.name] = out
    return chain_acceptance(head, data, embedding.float(), lm_head.float(), ids, depth=4).tau


@pytest.fixture(scope="module")
def heads(checkpoints, data, tmp_path_factory):
    """By kind: the offline tau of the head `trained-KIND`."""
    root = tmp_path_factory.mktemp("heads")
    return {kind: trained(kind, checkpoints, data, root / f"trained-{kind}") for kind in ("eagle", "eagle3")}


@pytest.mark.parametrize(("kind", "method"), [("eagle", "hass"), ("eagle3", "eagle2")])
def test_served_tau_is_the_offline_tau(engine, prompts, plain, heads, kind, method):
    offline = heads[kind]
    assert offline > 2.0  # else nothing was learnt, and nothing is compared
    llm = engine(f"trained-{kind}", {**CHAIN, "method": method})
    assert answers_of(llm, prompts, GREEDY) == plain
    assert acceptance_length(llm) == pytest.approx(offline, rel=0.05)


# ---- the same EAGLE-3 head as others publish theirs


@pytest.mark.parametrize(
    ("kind", "change", "share"),
    [
        ("eagle", published.with_few_positions, 1.0),
        ("eagle3", published.as_modelopt, 1.0),
        ("eagle3", published.of_another_width, 1.0),
        ("eagle3", published.with_shared_lm_head, 0.2),
    ],
)
def test_heads_as_others_publish_them(engine, checkpoints, prompts, plain, heads, tmp_path, kind, change, share):
    """`share`: of the tokens that the trained head has accepted, without the bonus token."""
    path = published.rewrite(checkpoints[f"trained-{kind}"], tmp_path / change.__name__, change, checkpoints["target"])
    checkpoints[path.name] = path
    llm = engine(path.name, CHAIN)
    assert answers_of(llm, prompts, GREEDY) == plain
    assert acceptance_length(llm) - 1 > 0.95 * share * (heads[kind] - 1)


@pytest.mark.parametrize(
    ("change", "target", "share"),
    [
        (published.with_two_qwen3_layers, "target", 0.5),
        (published.of_the_last_state, "target", 0.1),
        (published.with_more_norms, "target", 0.2),
        (published.narrower_than_the_target, "wide", 0.95),
    ],
)
def test_trees_from_heads_as_others_publish_them(
    engine, checkpoints, prompts, plain, heads, tmp_path, change, target, share
):
    """Tokens greedy and seeded; `share` as above, of what chains accept."""
    path = published.rewrite(checkpoints["trained-eagle3"], tmp_path / change.__name__, change, checkpoints["target"])
    checkpoints[path.name] = path
    if target == "wide":
        checkpoints["wide"] = published.write_wide_target(checkpoints["target"], tmp_path / "wide")
    expected = answers_of(engine(target=target), prompts, SEEDED)
    llm = engine(path.name, TREE, target=target)
    assert answers_of(llm, prompts, GREEDY) == plain
    assert acceptance_length(llm) - 1 > share * (heads["eagle3"] - 1)
    assert answers_of(llm, prompts, SEEDED) == expected


def test_a_parallel_head(engine, checkpoints, prompts, plain, heads, tmp_path, monkeypatch):
    """P-EAGLE: our chain accepts what vLLM's does, and a tree of as many nodes at least as much."""
    source = checkpoints["trained-eagle3"]
    path = published.rewrite(source, tmp_path / "peagle", published.with_a_mask, checkpoints["target"])
    checkpoints[path.name] = path
    stock = engine(path.name, {"method": "eagle3", "parallel_drafting": True, "num_speculative_tokens": 4})
    assert answers_of(stock, prompts, GREEDY) == plain
    tree = {"method": "dflash_tree", "draft_depth": 4, "num_speculative_tokens": 4, "min_node_value": 0.0}
    llm = engine(path.name, tree)
    monkeypatch.setattr(best_first, "WIDTH", 1)
    assert answers_of(llm, prompts, GREEDY) == plain
    chain = acceptance_length(stock)
    assert acceptance_length(llm) == pytest.approx(chain, rel=0.01) and chain > 1.5
    monkeypatch.undo()
    before = counters(llm)
    assert answers_of(llm, prompts, GREEDY) == plain
    assert acceptance_length(llm, before) >= chain
    expected = answers_of(engine(), prompts, SEEDED)
    assert answers_of(llm, prompts, SEEDED) == expected


def test_a_tree_accepts_more_than_vllms_chain(engine, checkpoints, prompts, plain, heads):
    """The same EAGLE-3 head, and the same number of verified tokens."""
    stock = engine("trained-eagle3", {"method": "eagle3", "num_speculative_tokens": 8})
    assert answers_of(stock, prompts, GREEDY) == plain
    llm = engine("trained-eagle3", {**TREE, "num_speculative_tokens": 8, "draft_depth": 8})
    assert answers_of(llm, prompts, GREEDY) == plain
    assert acceptance_length(llm) > acceptance_length(stock) > 2
