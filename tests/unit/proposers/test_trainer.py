"""The training loop: several processes, accumulation, clipping, schedules, log and plot, resuming, failing disks."""

import argparse
import json
import os
import socket
from dataclasses import replace

import pytest
import torch

from tests.doubles.trained import DRAFT, full_disk, make_answers, write_target
from vllm_specplug.cli import cli
from vllm_specplug.proposers.eagle2.checkpoint import load_head
from vllm_specplug.proposers.hass import train as hass
from vllm_specplug.proposers.training import eagle, features, log, loop, trainer
from vllm_specplug.proposers.training.team import Team, join

IDS = torch.arange(DRAFT)
SMALL = eagle.EagleOptions(epochs=1, batch_tokens=96, draft_vocab_size=DRAFT, align_steps=2)


def train(target, data, out, options=SMALL, **settings):
    task = eagle.EagleTask(target, IDS, options, device=settings.get("team", Team()).device)
    return trainer.train(task, data, str(out), trainer.RunSettings(progress=False, **settings))


@pytest.fixture(scope="module")
def feature_files(target, tmp_path_factory):
    return features.extract(target, make_answers(), tmp_path_factory.mktemp("features"), progress=False)


@pytest.fixture(scope="module")
def data(feature_files):
    return features.load_features(feature_files)


def weights(target, data, out, **changes):
    stop = changes.pop("max_steps", None)
    options = replace(SMALL, **changes)
    return train(target, data, out, options, max_steps=stop).state_dict()


# ---- steps


def test_clipping_by_value_bounds_every_element(target, data, tmp_path, monkeypatch):
    seen = []
    original = torch.optim.AdamW.step

    def step(self, *args):
        seen.append(max(p.grad.abs().max().item() for group in self.param_groups for p in group["params"]))
        return original(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    weights(target, data, tmp_path / "a", clip=0.0, clip_value=1e-3, max_steps=2)
    assert seen and all(value == pytest.approx(1e-3) for value in seen)
    seen.clear()
    weights(target, data, tmp_path / "b", clip=0.0, clip_value=0.0, max_steps=2)
    assert max(seen) > 2e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "wavy"}, "--schedule 'wavy' is unknown: choose one of cosine, linear"),
        ({"accumulate": 0}, "--accumulate must be at least 1"),
        ({"lr": -1.0}, "--lr must be above 0, not -1.0"),
        ({"warmup": 1.5}, "--warmup must be at least 0 and at most 1, not 1.5"),
        ({"distill_weight": 1.0, "ce_weight": 0.0}, "needs a --ce-weight above 0"),
    ],
)
def test_options_that_cannot_be_trained(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **changes)


def test_accumulation_is_the_mean_of_its_micro_batches(target, data, tmp_path, monkeypatch):
    options = replace(SMALL, accumulate=2, clip=0.0)
    task = eagle.EagleTask(target, IDS, options)
    task.prepare(data, fresh=True)
    expected = []
    for place, sequences in enumerate(loop.epoch_batches(data.lengths.tolist(), 96, 0, 0)[:2]):
        losses = task.losses(loop.make_batch(data, sequences), 0, 1, torch.Generator().manual_seed(place))
        expected.append(torch.autograd.grad(sum(losses.values()), task.head.fc.weight)[0])
    seen = []
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: seen.append(self.param_groups[0]["params"][0].grad))
    weights(target, data, tmp_path, accumulate=2, clip=0.0, max_steps=1)
    torch.testing.assert_close(seen[0], sum(expected) / 2)


def _train_in_a_team(environment, target, files, order, out):
    os.environ |= environment

    def load():
        with open(order, "a") as file:
            file.write(environment["RANK"])
        return features.load_features(files)

    with join("cpu") as team:
        data = team.leader_first(load)
        train(target, data, out, team=team, max_steps=3)


@pytest.mark.slow
def test_two_processes_make_the_steps_of_one_that_accumulates(target, feature_files, data, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # Both are new processes, because another test may have initialised torch.distributed in this one.
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # imported once for both
    both = [
        context.Process(
            target=_train_in_a_team,
            args=(
                shared | {"RANK": rank, "LOCAL_RANK": rank},
                target,
                feature_files,
                tmp_path / "order",
                str(tmp_path / "both"),
            ),
            daemon=True,
        )
        for rank in "01"
    ]
    for process in both:
        process.start()
    for process in both:
        process.join(300)
    assert [process.exitcode for process in both] == [0, 0]
    assert (tmp_path / "order").read_text() == "01"
    alone = weights(target, data, tmp_path / "alone", accumulate=2, max_steps=3)
    state = torch.load(tmp_path / "both" / trainer.STATE_NAME, weights_only=True)
    for name, tensor in alone.items():
        torch.testing.assert_close(state["head"][name], tensor, atol=1e-6, rtol=1e-5)
    # One process resumes where two processes stopped.
    assert weights(target, data, tmp_path / "both", accumulate=2).keys() == alone.keys()
    with pytest.raises(ValueError, match="other micro_batches"):
        weights(target, data, tmp_path / "both", accumulate=1)


@pytest.mark.parametrize(("name", "message"), [("tpu9", "unknown"), ("meta", "not supported"), ("cuda:7", "no device")])
def test_devices_that_are_not_there(name, message):
    with pytest.raises(ValueError, match=message), join(name):
        pass


def test_a_killed_run_resumes_to_the_same_weights(target, data, tmp_path, monkeypatch):
    """A run killed between two saves repeats the steps since the last save."""
    straight = weights(target, data, tmp_path / "a", epochs=2)
    original, calls = trainer.make_batch, []

    def dies(*args):
        calls.append(args)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(trainer, "make_batch", dies)
    monkeypatch.setattr(trainer, "LOG_EVERY", 1)
    weights(target, data, tmp_path / "b", epochs=2, max_steps=3)
    with pytest.raises(KeyboardInterrupt):
        weights(target, data, tmp_path / "b", epochs=2)
    assert [row["step"] for row in log.read_log(tmp_path / "b")] == [1, 2, 3, 4, 5]
    resumed = weights(target, data, tmp_path / "b", epochs=2)
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    steps = [row["step"] for row in log.read_log(tmp_path / "b")]
    assert steps == list(range(1, len(steps) + 1))  # no step is logged twice


# ---- measuring


def test_log(target, data, tmp_path):
    train(target, data, tmp_path, dev=data, eval_every=2)
    rows = log.read_log(tmp_path)
    steps = load_head(tmp_path)[0]["specplug"]["steps"]
    measured = [row for row in rows if "alpha" in row]
    assert [row["step"] for row in measured] == [*range(2, steps, 2), steps]
    assert all(len(row["alpha"]) == 6 and row["tau"] >= 1 for row in measured)
    losses = [row for row in rows if "loss" in row]
    assert losses[-1]["step"] == steps and losses[-1]["loss"].keys() == {"feature", "ce"}
    assert all(row["tokens_per_s"] > 0 and row["lr"] > 0 for row in losses)


# ---- HASS


def write_answers(file):
    rows = [{"source": a.source, "prompt_ids": a.prompt_ids, "answer_ids": a.answer_ids} for a in make_answers(12)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_train_hass_from_the_command_line(target, tmp_path):
    answers = write_answers(tmp_path / "answers.jsonl")
    flags = ["--epochs", "1", "--draft-vocab-size", str(DRAFT), "--step-weight", "0.5"]
    argv = ["train", "hass", "--target", target, "--answers", answers, "--out", str(tmp_path / "out"), *flags]
    assert cli.main([*argv, "--traceback"]) == 0
    options = load_head(tmp_path / "out")[0]["specplug"]["options"]
    assert (options["align_steps"], options["step_weight"], options["distill_weight"]) == (3, 0.5, 1.0)
    assert eagle.load_trained(str(tmp_path / "out"))[1].numel() == DRAFT


def test_published_preset_trains_two_phases(target, tmp_path, monkeypatch):
    real = hass.published_schedule
    monkeypatch.setattr(hass, "published_schedule", lambda o: tuple(replace(p, epochs=1) for p in real(o)))
    parser = argparse.ArgumentParser()
    hass.add_arguments(parser)
    answers = write_answers(tmp_path / "answers.jsonl")
    argv = ["--target", target, "--answers", answers, "--out", str(tmp_path / "out"), "--preset", "published"]
    assert hass.run(parser.parse_args([*argv, "--draft-vocab-size", str(DRAFT)])) == 0
    first, second = (load_head(tmp_path / "out" / name)[0]["specplug"] for name in ("phase1", "."))
    assert (first["options"]["lr"], first["options"]["distill_weight"]) == (3e-5, 0.0)
    assert (second["options"]["lr"], second["options"]["distill_weight"]) == (1e-5, 1.0)
    assert first["init_from"] is None and second["init_from"] == "phase1"


def test_step_weight_and_noise_length_enter_the_loss(target, data):
    batch = loop.make_batch(data, list(range(6)))

    def loss(**changes):
        task = eagle.EagleTask(target, IDS, replace(SMALL, **changes))
        task.prepare(data, fresh=True)
        return task.losses(batch, 0, 1, torch.Generator().manual_seed(0))["feature"].item()

    one, two, half = loss(align_steps=1), loss(align_steps=2), loss(align_steps=2, step_weight=0.5)
    assert half == pytest.approx((one + two) / 2, rel=1e-5)
    rows = batch.features.shape[1]
    assert loss(noise=0.2, noise_length=rows) == loss(noise=0.2) != loss(noise=0.2, noise_length=4 * rows)


# ---- bad input


def test_checkpoint_to_start_from_must_fit(target, data, tmp_path):
    weights(target, data, tmp_path / "head")
    other = write_target(tmp_path / "other", hidden=32)
    with pytest.raises(ValueError, match="hidden size 16, the target 32"):
        eagle.EagleTask(other, IDS, SMALL, str(tmp_path / "head"))
    with pytest.raises(ValueError, match="no fc.bias: train without --bias"):
        eagle.EagleTask(target, IDS, replace(SMALL, bias=True), str(tmp_path / "head"))


def test_features_of_another_model_are_refused(target, data, tmp_path):
    other = write_target(tmp_path / "other", hidden=32)
    with pytest.raises(ValueError, match="features have hidden size 16, the target 32: they belong to another model"):
        train(other, data, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    features.extract(target, make_answers(3), tmp_path / "cache", progress=False)
    with pytest.raises(ValueError, match="has features of the target .*, not of 'other'"):
        features.extract(other, make_answers(3), tmp_path / "cache", progress=False)


def test_full_disk_leaves_the_last_state_and_no_half_file(target, data, tmp_path):
    weights(target, data, tmp_path, max_steps=1)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with full_disk(4096), pytest.raises(OSError, match="training_state.pt could not be written.*Free disk space"):
        weights(target, data, tmp_path, max_steps=2)
    after = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert after.pop(log.LOG_NAME).startswith(before.pop(log.LOG_NAME))
    assert after == before
    straight, resumed = weights(target, data, tmp_path / "a"), weights(target, data, tmp_path)
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_linear_schedule_falls_to_zero():
    rates = [loop.learning_rate(step, 100, 1.0, 0.1, schedule="linear") for step in range(101)]
    assert rates[9] == 1.0 and rates[100] == 0.0
    assert [round(a - b, 6) for a, b in zip(rates[10:], rates[11:], strict=False)] == [round(1 / 90, 6)] * 90


def test_hass_defaults_are_the_papers():
    options = hass.HassTrainOptions()
    assert (options.align_steps, options.distill_loss, options.topk, options.distill_weight) == (3, "topk", 10, 1.0)
    first, second = hass.published_schedule(options)
    assert (first.epochs, first.lr, first.distill_weight) == (40, 3e-5, 0.0)
    assert (second.epochs, second.lr, second.distill_weight, second.topk) == (10, 1e-5, 1.0, 10)
    for phase in (first, second):
        assert (phase.align_steps, phase.warmup, phase.clip, phase.clip_value) == (3, 0.01, 0.0, 0.5)
        assert (phase.noise, phase.noise_length, phase.feature_weight, phase.ce_weight) == (0.2, 512, 1.0, 0.1)
