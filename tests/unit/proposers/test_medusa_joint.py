"""MEDUSA-2 without an engine: stages, losses, what happens to the backbone, and its export."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from tests.doubles import tiny, trained
from vllm_specplug.proposers.medusa import joint
from vllm_specplug.proposers.medusa.checkpoint import validate_medusa
from vllm_specplug.proposers.training import loop, trainer
from vllm_specplug.proposers.training.answers import Answer
from vllm_specplug.proposers.training.features import FeatureSet, target_head

DRAFT = 120

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    return str(tiny.write_target(tmp_path_factory.mktemp("target") / "tiny"))


@pytest.fixture(scope="module")
def answers(target) -> list[Answer]:
    """The target's own answers: its loss on them is low, so that harm by training shows."""
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    prompts = torch.randint(3, tiny.VOCAB, (48, 6), generator=torch.Generator().manual_seed(0))
    ids = model.generate(prompts, max_new_tokens=20, min_new_tokens=20, do_sample=False)
    return [Answer("tiny", row[:6], row[6:]) for row in ids.tolist()]


@pytest.fixture(scope="module")
def data(target, answers, tmp_path_factory) -> FeatureSet:
    return trained.make_features(target, answers[:24], tmp_path_factory.mktemp("features"))


@pytest.fixture(scope="module")
def held_out(target, answers, tmp_path_factory) -> FeatureSet:
    return trained.make_features(target, answers[24:], tmp_path_factory.mktemp("held-out"))


def options(**changes) -> joint.JointTraining:
    settings = {"epochs": 6, "batch_tokens": 96, "draft_vocab_size": DRAFT, "num_heads": 2, "lora_rank": 4}
    return joint.JointTraining(**(settings | changes))


def fit(target, data, out, dev=None, max_steps=None, **changes) -> joint.JointTask:
    task = joint.JointTask(target, torch.arange(DRAFT), options(**changes))
    trainer.train(task, data, str(out), trainer.RunSettings(dev=dev, max_steps=max_steps, progress=False))
    return task


def adapter_of(task) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in task.head.adapter.values()])


def test_the_first_stage_is_medusa_1(target, data, tmp_path):
    """The first stage trains only the heads, on the cached features; the second stage trains both."""
    task = joint.JointTask(target, torch.arange(DRAFT), options())
    batch, generator = loop.make_batch(data, [0, 3, 5]), torch.Generator().manual_seed(1)
    first = task.losses(batch, 2, 10, generator)
    alone = joint.MedusaTask(target, torch.arange(DRAFT), options()).losses(batch, 2, 10, generator)
    assert first.keys() == alone.keys() and all(torch.equal(first[name], alone[name]) for name in alone)
    sum(first.values()).backward()
    assert all(weight.grad is None for weight in task.head.adapter.values())
    sum(task.losses(batch, 3, 10, generator).values()).backward()
    assert all(weight.grad is not None for weight in task.head.adapter.values())
    assert len(task.head.adapter) == 2 * 2 * 7  # two matrices for each of seven linear layers in both decoder layers


def test_second_stage_losses(target, data):
    """With a new adapter the backbone equals the target: its loss is the entropy; the heads' losses are weighted."""
    task = joint.JointTask(target, torch.arange(DRAFT), options(lora_dropout=0.0, heads_first=0.0, heads_weight=0.5))
    batch, generator = loop.make_batch(data, [0, 3, 5], dtype=torch.float32), torch.Generator().manual_seed(1)
    found = task.losses(batch, 4, 10, generator)
    probs = (batch.target_features[batch.in_answer] @ target_head(target)[2].float().T).softmax(-1)
    assert found["backbone"].item() == pytest.approx(-(probs * probs.log()).sum(-1).mean().item(), rel=1e-3)
    weight = 0.5 * torch.sin(torch.tensor(torch.pi / 4)).item()
    alone = task.head_losses(task.heads, batch, batch.features)
    for name, loss in alone.items():
        assert found[name].item() == pytest.approx(weight * loss.item(), rel=1e-2)


def test_dropout_is_drawn_from_the_step(target, data):
    task = joint.JointTask(target, torch.arange(DRAFT), options(heads_first=0.0, lora_dropout=0.5))
    for weight in task.head.adapter.values():
        torch.nn.init.normal_(weight, std=0.3)
    batch = loop.make_batch(data, [0, 3])
    one, again, other = (
        sum(task.losses(batch, 4, 10, torch.Generator().manual_seed(seed)).values()).item() for seed in (1, 1, 2)
    )
    assert one == again != other


@pytest.mark.slow
def test_the_backbone_keeps_its_loss_and_is_exported_merged(target, data, held_out, tmp_path):
    strong = {"lr": 5e-3, "epochs": 20}
    task = fit(target, data, tmp_path / "a", dev=held_out, **strong)
    info = validate_medusa(tmp_path / "a", tiny.HIDDEN, tiny.VOCAB)
    facts = info.config["specplug"]
    losses = facts["dev_backbone_loss"]
    assert losses["after"] != losses["before"] and losses["after"] == pytest.approx(losses["before"], rel=0.02)
    assert facts["backbone"] == joint.BACKBONE and len(facts["dev_accuracies"]) == 2
    # A heads' loss with a far larger weight harms the backbone: the check above can fail.
    harmed = fit(target, data, tmp_path / "b", dev=held_out, heads_weight=1e3, **strong)
    print(losses, harmed._losses)
    assert harmed._losses["after"] > 1.02 * losses["before"]
    # The merged weights equal the adapted model.
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b" / joint.BACKBONE, dtype="auto")
    plain = transformers.AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    again = joint.JointTask(target, torch.arange(DRAFT), options())
    again.head.load_state_dict(harmed.head.state_dict())
    ids = held_out.ids[: int(held_out.lengths[0])].unsqueeze(0)
    with torch.no_grad():
        adapted = again.backbone.eval()(input_ids=ids).last_hidden_state
        torch.testing.assert_close(merged.model(input_ids=ids).last_hidden_state, adapted, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(plain.model(input_ids=ids).last_hidden_state, adapted, atol=1e-2)
    assert merged.dtype == plain.dtype and torch.equal(merged.lm_head.weight, plain.lm_head.weight)
    assert adapter_of(task).abs().sum() > 0


@pytest.mark.slow
def test_resumed_training_is_bit_exact(target, data, tmp_path):
    straight = fit(target, data, tmp_path / "a").head.state_dict()
    fit(target, data, tmp_path / "b", max_steps=5)
    resumed = fit(target, data, tmp_path / "b").head.state_dict()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_command_line_and_bad_options(target, answers, tmp_path):
    rows = [{"source": a.source, "prompt_ids": a.prompt_ids, "answer_ids": a.answer_ids} for a in answers]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parser = argparse.ArgumentParser()
    joint.add_arguments(parser)
    words = ["--target", target, "--answers", str(tmp_path / "answers.jsonl"), "--out", str(tmp_path / "out")]
    joint.run(parser.parse_args([*words, "--epochs", "1", "--draft-vocab-size", str(DRAFT), "--lora-rank", "2"]))
    assert (tmp_path / "out" / joint.BACKBONE / "config.json").exists()
    with pytest.raises(ValueError, match="--heads-first must be at least 0 and at most 1"):
        options(heads_first=1.5)
    with pytest.raises(ValueError, match="--lora-rank must be at least 1"):
        options(lora_rank=0)
