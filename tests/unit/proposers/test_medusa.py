"""Medusa without an engine: heads, checkpoint layouts, sparse trees, drafting, training, calibration."""

from __future__ import annotations

import argparse
import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.doubles import trained
from vllm_specplug.bench.methods import METHODS
from vllm_specplug.config import ConfigError, parse_options
from vllm_specplug.proposers.eagle2.checkpoint import CheckpointError, offsets, save_head
from vllm_specplug.proposers.medusa import calibrate, train
from vllm_specplug.proposers.medusa.checkpoint import load_medusa, validate_medusa
from vllm_specplug.proposers.medusa.drafting import choose_tree, fill_tree
from vllm_specplug.proposers.medusa.heads import MedusaHeads, heads_from_state
from vllm_specplug.proposers.medusa.options import MedusaOptions, resolve
from vllm_specplug.proposers.medusa.ranks import (
    MeasuredProbabilities,
    chain_acceptance,
    head_accuracies,
    load_for_ranking,
    rank_answers,
    simulate_tau,
)
from vllm_specplug.proposers.medusa.sparse_tree import (
    check_paths,
    default_tree,
    grow,
    grow_from_accuracies,
    parents_of,
)
from vllm_specplug.proposers.training import loop, trainer
from vllm_specplug.proposers.training.features import FeatureSet, target_head

HIDDEN, VOCAB, DRAFT = trained.HIDDEN, trained.VOCAB, trained.DRAFT


def random_heads(num_heads=3, num_layers=2, seed=0) -> MedusaHeads:
    torch.manual_seed(seed)
    heads = MedusaHeads(num_heads, num_layers, HIDDEN)
    for parameter in heads.parameters():
        nn.init.normal_(parameter, std=0.3)
    return heads


# ---- heads


def test_heads_equal_their_formula():
    heads = random_heads()
    hidden = torch.randn(5, HIDDEN)
    with torch.no_grad():
        found = heads(hidden)
        for head in range(3):
            x = hidden
            for layer in range(2):
                x = x + F.silu(F.linear(x, heads.weight[layer, head], heads.bias[layer, head]))
            torch.testing.assert_close(found[:, head], x)


# ---- checkpoints


def write(path, state=None, **config):
    save_head(path, config, random_heads().checkpoint_state() if state is None else state)
    return path


def refusal(path, hidden=HIDDEN, vocab=VOCAB) -> str:
    with pytest.raises(CheckpointError) as caught:
        validate_medusa(path, hidden, vocab)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_round_trip_of_both_layouts(tmp_path):
    heads = random_heads()
    info = validate_medusa(write(tmp_path / "legacy", medusa_num_heads=3, medusa_num_layers=2), HIDDEN, VOCAB)
    assert (info.num_heads, info.num_layers, info.has_lm_heads, info.draft_vocab_size) == (3, 2, False, VOCAB)
    again = heads_from_state(load_medusa(info.path), 3, 2)
    assert torch.equal(again.weight, heads.weight) and torch.equal(again.bias, heads.bias) and again.lm_heads is None
    heads.add_lm_heads(torch.randn(DRAFT, HIDDEN))
    state = heads.checkpoint_state() | {"d2t": offsets(torch.arange(DRAFT))}
    info = validate_medusa(write(tmp_path / "full", state), HIDDEN, VOCAB)
    assert (info.has_lm_heads, info.has_d2t, info.draft_vocab_size) == (True, True, DRAFT)
    assert torch.equal(heads_from_state(load_medusa(info.path), 2, 2).lm_heads, heads.lm_heads[:2])


def test_official_pickle_with_prefixed_names(tmp_path):
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 2, "base_model_name_or_path": "some/base"}')
    state = {f"medusa_head.{name}": tensor for name, tensor in random_heads().checkpoint_state().items()}
    torch.save(state, tmp_path / "medusa_lm_head.pt")
    info = validate_medusa(tmp_path, HIDDEN, VOCAB)
    assert (info.num_heads, info.num_layers) == (2, 2)  # the config may name fewer than the weights have
    assert torch.equal(load_medusa(tmp_path)["0.1.linear.bias"], random_heads().bias[1, 0])


class Harmful:
    def __reduce__(self):
        return (print, ("ran",))


def test_refusals(tmp_path):
    assert "not a Medusa checkpoint" in refusal(write(tmp_path / "other", {"fc.weight": torch.zeros(2)}))
    assert "has 4 heads" in refusal(write(tmp_path / "heads", medusa_num_heads=4))
    assert "has 3 layers per head" in refusal(write(tmp_path / "layers", medusa_num_layers=3))
    assert "must be an integer from 1" in refusal(write(tmp_path / "zero", medusa_num_heads=0))
    base = write(tmp_path / "base", base_model_name_or_path="some/base")
    assert "trained on some/base, and they use that model's LM head" in refusal(base, hidden=2 * HIDDEN)
    own = random_heads()
    own.add_lm_heads(torch.zeros(DRAFT, HIDDEN))
    assert "or d2t is missing" in refusal(write(tmp_path / "own", own.checkpoint_state()))
    (tmp_path / "harmful").mkdir()
    (tmp_path / "harmful" / "config.json").write_text("{}")
    torch.save({"0.0.linear.weight": Harmful()}, tmp_path / "harmful" / "medusa_lm_head.pt")
    assert "refused, because loading it could run" in refusal(tmp_path / "harmful")


# ---- options


def test_resolution_of_tree_depth_and_nodes(tmp_path):
    path = str(write(tmp_path))
    options = resolve(MedusaOptions(model=path, num_speculative_tokens=10), HIDDEN, VOCAB)
    assert options.tree == default_tree(3, VOCAB, 10) and options.num_speculative_tokens == 10
    assert resolve(MedusaOptions(model=path, draft_depth=1), HIDDEN, VOCAB).draft_depth == 1
    dynamic = resolve(MedusaOptions(model=path, dynamic=True, draft_depth=1), HIDDEN, VOCAB)
    assert (dynamic.num_speculative_tokens, dynamic.draft_top_k, dynamic.tree) == (8, 8, None)
    with pytest.raises(ConfigError, match="draft_depth=4 needs more heads"):
        resolve(MedusaOptions(model=path, draft_depth=4), HIDDEN, VOCAB)
    assert (dynamic.node_floor, replace(dynamic, min_node_value=0.2).node_floor) == (0.06, 0.2)
    assert MedusaOptions(model=path).node_floor == replace(dynamic, budget="measured").node_floor == 0
    with pytest.raises(ConfigError, match="dynamic must be true or false"):
        MedusaOptions(model=path, dynamic="yes")


def test_shipped_heads_are_found_by_name():
    options = resolve(MedusaOptions(model="smollm2-135m-instruct"), 576, 49152)
    assert options.num_speculative_tokens == len(options.tree) > 1 and options.tree != default_tree(3, 4096, 16)
    info = validate_medusa(options.model, 576, 49152)
    assert not info.has_lm_heads and (info.path / "model.safetensors").stat().st_size < 12e6
    assert {"command", "commit", "data_sha256", "dev_accuracies"} <= info.config["specplug"].keys()
    for config in (METHODS["medusa"], METHODS["medusa-chain"]):
        assert resolve(parse_options(config), 576, 49152).draft_depth <= info.num_heads


# ---- sparse trees


def test_growth_takes_the_best_nodes_for_every_budget():
    generator = torch.Generator().manual_seed(3)
    accuracies = torch.rand(3, 4, generator=generator).sort(dim=1, descending=True).values.div(3).tolist()
    paths, values = grow_from_accuracies(accuracies, 30)
    values_of = {}
    for depth in (1, 2, 3):
        for path in itertools.product(range(4), repeat=depth):
            values_of[path] = (
                torch.tensor([accuracies[k][i] for k, i in enumerate(path)], dtype=torch.float64).prod().item()
            )
    best = sorted(values_of.values(), reverse=True)[:30]
    assert values == pytest.approx(best) and values == sorted(values, reverse=True)
    for budget in (1, 5, 17):  # values do not rise along paths, so the best nodes are a tree
        assert {tuple(path) for path in paths[:budget]} == set(
            sorted(values_of, key=values_of.get, reverse=True)[:budget]
        )
        assert check_paths([list(path) for path in paths[:budget]], "tree") == paths[:budget]
    assert grow_from_accuracies([[0.5, 0.0]], 9) == (((0,),), [0.5])  # nodes of value 0 are not grown


def test_parents_and_default_tree():
    assert parents_of(((0,), (1,), (0, 0), (1, 2), (0, 0, 5))) == (0, 0, 1, 2, 3)
    tree = default_tree(4, 1000, 63)
    assert len(tree) == 63 and check_paths(tree, "tree") == tree
    assert max(map(len, tree)) == 4 and (0, 0, 0) in tree[:16]
    assert max(map(len, default_tree(2, 5, 63))) == 2


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ("chain", "non-empty list"),
        ([[]], "no rank path"),
        ([[0], ["1"]], "no rank path"),
        ([[True]], "no rank path"),
        ([[-1]], "no rank path"),
        ([[0, 0], [0]], "has no parent of"),
        ([[0], [0]], "twice"),
        ([[i] for i in range(256)], "at most 255"),
    ],
)
def test_bad_trees(tree, message):
    with pytest.raises(ConfigError, match=message):
        check_paths(tree, "tree")


# ---- drafting


def test_a_fixed_shape_is_filled_by_rank():
    logits = torch.randn(2, 3, DRAFT, generator=torch.Generator().manual_seed(1))
    ids = torch.arange(DRAFT) + 7
    paths = ((1,), (0,), (1, 0), (1, 0, 4))
    draft = fill_tree(torch.tensor([40, 41]), logits, ids, paths)
    tree, log_probs = draft.tree, logits.log_softmax(-1).sort(dim=-1, descending=True).values
    torch.testing.assert_close(draft.log_values[:, 4], log_probs[:, 0, 1] + log_probs[:, 1, 0] + log_probs[:, 2, 4])
    order = logits.argsort(dim=-1, descending=True) + 7
    for r in range(2):
        expected = [40 + r, order[r, 0, 1], order[r, 0, 0], order[r, 1, 0], order[r, 2, 4]]
        assert tree.token_ids[r].tolist() == [int(token) for token in expected]
    assert tree.parents[0].tolist() == [-1, 0, 0, 1, 3] and tree.num_rows.tolist() == [5, 5]


@pytest.mark.parametrize("floor", [0.0, 0.06])
def test_chosen_nodes_are_the_likeliest_products(floor):
    logits = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(2)) * 2
    tree = choose_tree(torch.tensor([0, 0]), logits, None, num_nodes=12, draft_top_k=6, min_node_value=floor).tree
    log_probs = logits.log_softmax(-1)
    for r in range(2):
        log_values = {
            path: sum(log_probs[r, k, token].item() for k, token in enumerate(path))
            for depth in (1, 2, 3)
            for path in itertools.product(range(6), repeat=depth)
        }
        drafted, paths = {}, [()]
        for row in range(1, int(tree.num_rows[r])):
            paths.append((*paths[int(tree.parents[r, row])], int(tree.token_ids[r, row])))
            drafted[paths[-1]] = log_values[paths[-1]]
        best = sorted(log_values, key=log_values.get, reverse=True)[:12]
        kept = {path for path in best if math.exp(log_values[path]) >= floor}
        assert set(drafted) == kept
        assert (len(kept) == 12) == (floor == 0)


# ---- ranks and calibration


def known_ranks() -> tuple[MedusaHeads, FeatureSet, torch.Tensor]:
    """Heads without a change of h and an identity LM head: feature t has the scores of tokens, so ranks are known."""
    ids = torch.tensor([1, 4, 2, 7, 3, 5, 0, 6])
    scores = torch.zeros(8, HIDDEN)
    for t in range(8):
        for k, value in ((1, 1.0), (2, 3.0), (3, 2.0)):  # the token two places after it has the highest score
            if t + k < 8:
                scores[t, ids[t + k]] = value
    return MedusaHeads(2, 1, HIDDEN), FeatureSet(scores, ids, torch.tensor([8]), torch.tensor([3])), torch.eye(HIDDEN)


def test_ranks_of_known_answers():
    heads, data, lm_head = known_ranks()
    (ranks,) = rank_answers(heads, data, lm_head, torch.arange(HIDDEN))
    # Rows of features 2..6; head 1 ranks token t + 2 (rank 0), head 2 ranks token t + 3 (rank 1).
    assert ranks.tolist() == [[0, 1], [0, 1], [0, 1], [0, -1], [-1, -1]]
    (reduced,) = rank_answers(heads, data, lm_head[:5], torch.arange(5), max_ranks=3)
    assert reduced[:, 0].tolist() == [0, 3, 0, 3, -1]  # tokens 5 and 6 cannot be proposed


def test_accuracies_probabilities_and_tau():
    ranks = torch.tensor([[0, 0], [0, 1], [1, 0], [0, 0], [3, -1]])
    assert head_accuracies([ranks], 4)[0] == pytest.approx([0.6, 0.2, 0, 0.2])
    exact = MeasuredProbabilities(ranks, prior=0.0, num_ranks=4)
    assert exact((), 0) == pytest.approx(0.6) and exact((0,), 0) == pytest.approx(2 / 3) and exact((1,), 0) == 1.0
    independent = MeasuredProbabilities(ranks, prior=1e9, num_ranks=4)
    assert independent((1,), 0) == pytest.approx(0.75) and independent((2,), 1) == pytest.approx(0.25)
    paths, values = grow(exact, 2, 4, 3)
    assert paths == ((0,), (0, 0), (1,)) and values == pytest.approx([0.6, 0.4, 0.2])
    # An answer: accepted 2, then 1 (tokens run out), so 2 steps.
    answer = [torch.tensor([[0, 0], [9, 9], [9, 9], [0, 1], [1, -1], [-1, -1]])]
    assert simulate_tau(answer, paths) == pytest.approx(1 + (2 + 1) / 2)
    assert chain_acceptance(answer).tau == pytest.approx(1 + (2 + 1) / 2)


def test_expected_tau_equals_the_held_out_one_on_independent_hits():
    generator = torch.Generator().manual_seed(0)
    weights = torch.tensor([0.5, 0.2, 0.1, 0.2])
    answers = []
    for _ in range(40):
        ranks = torch.multinomial(weights, 100 * 2, replacement=True, generator=generator).view(100, 2)
        ranks[ranks == 3] = 32
        ranks[-1], ranks[-2, 1] = -1, -1
        answers.append(ranks)
    result = calibrate.calibrate(answers, budget=6, prior=30.0)
    assert result["medusa_choices"][:2] == [[0], [0, 0]]
    assert result["held_out_tau"]["6"] == pytest.approx(result["expected_tau"][5], rel=0.05)
    with pytest.raises(ValueError, match="at least 2 answers"):
        calibrate.calibrate(answers[:1], 6, 30.0)


# ---- training


def fit(target, data, out, **changes) -> MedusaHeads:
    stop = changes.pop("max_steps", None)
    settings = {"epochs": 1, "batch_tokens": 96, "draft_vocab_size": DRAFT, "num_heads": 3} | changes
    options = train.MedusaTraining(**settings)
    task = train.MedusaTask(target, torch.arange(DRAFT), options)
    return trainer.train(task, data, str(out), trainer.RunSettings(dev=data, max_steps=stop, progress=False))


@pytest.mark.parametrize("label_topk", [0, 5])
def test_the_loss_is_the_weighted_cross_entropy_of_every_head(target, data, label_topk):
    options = train.MedusaTraining(num_heads=3, draft_vocab_size=DRAFT, decay=0.5, label_topk=label_topk)
    task = train.MedusaTask(target, torch.arange(DRAFT), options)
    nn.init.normal_(task.head.weight, std=0.05)
    chosen = [0, 3, 5]
    batch = loop.make_batch(data, chosen, dtype=torch.float32)
    found = task.losses(batch, 0, 1, torch.Generator())
    lm_head = target_head(target)[2][:DRAFT].float()
    for k in (1, 2, 3):
        terms = []
        for i in chosen:
            start, length, prompt = (int(values[i]) for values in (data.starts, data.lengths, data.prompt_lengths))
            for t in range(length - k - 1):
                # label: token t + k + 1, in the answer and in the draft vocabulary
                if t + k + 1 >= prompt and data.ids[start + t + k + 1] < DRAFT:
                    logits = data.features[start + t + k].float() @ lm_head.T
                    if label_topk:
                        logits[logits < logits.topk(label_topk).values[-1]] = -torch.inf
                    probs = logits.softmax(-1)
                    head = task.head(data.features[start + t].float().unsqueeze(0))[0, k - 1]
                    terms.append(-(probs * (head @ lm_head.T).log_softmax(-1)).sum())
        assert found[f"head {k}"].item() == pytest.approx(0.5**k * torch.stack(terms).mean().item(), rel=0.02)


@pytest.mark.parametrize("own", [False, True])
def test_exported_heads_are_valid_and_start_a_new_run(target, data, tmp_path, own):
    heads = fit(target, data, tmp_path / "a", own_lm_heads=own, num_layers=2)
    info = validate_medusa(tmp_path / "a", HIDDEN, VOCAB)
    assert (info.num_heads, info.num_layers, info.has_lm_heads, info.has_d2t) == (3, 2, own, True)
    source = info.config["specplug"]
    assert {"target", "command", "options", "dev_chain_tau"} <= source.keys() and len(source["dev_accuracies"]) == 3
    again, draft_head, ids = load_for_ranking(tmp_path / "a", target_head(target)[2])
    torch.testing.assert_close(again.weight, heads.weight.detach(), atol=1e-2, rtol=1e-2)
    assert draft_head.shape == ((3, DRAFT, HIDDEN) if own else (DRAFT, HIDDEN)) and torch.equal(
        ids, torch.arange(DRAFT)
    )
    options = train.MedusaTraining(num_heads=3, num_layers=2, own_lm_heads=own)
    task = train.MedusaTask(target, ids, options, init_from=str(tmp_path / "a"))
    task.prepare(data, fresh=True)
    assert torch.equal(task.head.weight, again.weight)
    with pytest.raises(ValueError, match="3 heads of 2 layers"):
        train.MedusaTask(target, ids, train.MedusaTraining(num_heads=2), init_from=str(tmp_path / "a"))


def test_command_lines_from_answers_to_a_calibrated_checkpoint(target, tmp_path, capsys):
    rows = [
        {"source": a.source, "prompt_ids": a.prompt_ids, "answer_ids": a.answer_ids} for a in trained.make_answers()
    ]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = [
        "--target",
        target,
        "--answers",
        str(tmp_path / "answers.jsonl"),
        "--features",
        str(tmp_path / "features"),
    ]
    for module, options in (
        (train, ["--out", str(tmp_path / "heads"), "--epochs", "1", "--draft-vocab-size", str(DRAFT)]),
        (calibrate, ["--out", str(tmp_path / "tree"), "--model", str(tmp_path / "heads"), "--budget", "12"]),
    ):
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        extra = ["--into-model"] if module is calibrate else []
        assert module.run(parser.parse_args([*common, *options, *extra])) == 0
    written = json.loads((tmp_path / "tree" / "tree.json").read_text())
    assert len(written["expected_tau"]) == 12 and written["specplug"]["prompts"] == 24
    assert "held-out tau" in capsys.readouterr().out
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    assert config["medusa_choices"] == written["medusa_choices"] and config["medusa_num_heads"] == 4
    resolved = resolve(MedusaOptions(model=str(tmp_path / "heads")), HIDDEN, VOCAB)
    assert [list(path) for path in resolved.tree] == written["medusa_choices"]


def test_resumed_training_is_bit_exact_and_lowers_the_loss(target, data, tmp_path):
    straight = fit(target, data, tmp_path / "a", epochs=4, lr=1e-2).state_dict()
    fit(target, data, tmp_path / "b", epochs=4, lr=1e-2, max_steps=3)
    assert not (tmp_path / "b" / "config.json").exists()
    resumed = fit(target, data, tmp_path / "b", epochs=4, lr=1e-2).state_dict()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    options = train.MedusaTraining(num_heads=3, draft_vocab_size=DRAFT)
    task = train.MedusaTask(target, torch.arange(DRAFT), options)
    batch = loop.make_batch(data, list(range(8)))
    before = sum(task.losses(batch, 0, 1, torch.Generator()).values())
    task.head.load_state_dict(straight)
    assert sum(task.losses(batch, 0, 1, torch.Generator()).values()) < before
