"""`specplug learn` and `specplug drafter new`, with real files and a tiny target."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from tests.doubles import tiny
from tests.unit.proposers.test_recorded import recorded_from
from vllm_specplug.cli import cli
from vllm_specplug.config import parse_options, resolve_drafter
from vllm_specplug.proposers.training import comparison, learning
from vllm_specplug.proposers.training.answers import Answer, adapted_vocabulary
from vllm_specplug.proposers.training.eagle import EagleOptions, load_trained
from vllm_specplug.proposers.training.features import extract, load_features
from vllm_specplug.proposers.training.learning import Learner
from vllm_specplug.proposers.training.recorded import shard_files
from vllm_specplug.utils.published import current_folder, read_current

QUICK = EagleOptions(epochs=3, batch_tokens=512, align_steps=2, lr=3e-3)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    pytest.importorskip("transformers")
    return str(tiny.write_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def answered(target, tmp_path_factory):
    """Features of greedy answers of the target."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    prompts = torch.randint(3, tiny.VOCAB, (96, 6), generator=torch.Generator().manual_seed(0))
    texts = model.generate(prompts, max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0)
    answers = [Answer("test", text[:6], text[6:]) for text in texts.tolist()]
    return load_features(extract(target, answers, tmp_path_factory.mktemp("features"), progress=False))


@pytest.fixture
def ring(answered, tmp_path):
    recorded_from(answered, tmp_path / "ring", shards=3)
    return str(tmp_path / "ring")


def new_drafter(target, head, *more):
    assert cli.main(["drafter", "new", target, "--out", str(head), "--traceback", *more]) == 0
    return head


def make_learner(target, ring, head, **changes):
    options = {"further": QUICK, "from_nothing": replace(QUICK, epochs=8), "progress": False}
    return Learner(target, ring, head, None, **{**options, **changes})


@pytest.mark.parametrize("with_data", [False, True])
def test_a_new_drafter_is_a_whole_checkpoint_and_says_that_it_is_untrained(target, ring, tmp_path, capsys, with_data):
    head = new_drafter(target, tmp_path / "head", *(["--data", ring] if with_data else []), "--draft-vocab-size", "60")
    printed = re.search(r"--speculative-config '(.*)'", capsys.readouterr().out)[1]
    options = parse_options(json.loads(printed) | {"record": str(tmp_path / "recorded")})
    assert options.reload and options.model == str(head)
    folder = resolve_drafter(str(head))
    module, ids = load_trained(str(folder))
    assert folder == head / "versions/000001" and ids.numel() == 60 and 2 in ids.tolist()
    assert json.loads((folder / "config.json").read_text())["specplug"]["untrained"] is True
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    if with_data:
        counts = torch.bincount(load_features(shard_files(ring)).ids, minlength=tiny.VOCAB)
        assert counts[ids].sum() > 1.3 * counts[: ids.numel()].sum()
    assert cli.main(["drafter", "new", target, "--out", str(head)]) == 2


@pytest.mark.slow
def test_rounds_publish_what_is_better_on_new_answers_and_forgets_no_old_ones(
    target, ring, answered, tmp_path, monkeypatch
):
    head = new_drafter(target, tmp_path / "head")
    learner = make_learner(target, ring, head)
    outcome = learner.run(learner.plan())
    assert outcome.published is not None and outcome.published.version == 2 and learner.patience == 1
    current = read_current(head)
    facts = current.facts
    assert facts["chain_tau"] > facts["baseline_chain_tau"] + 0.2
    assert facts["tree_tau"] > facts["baseline_tree_tau"] + 0.2
    config = json.loads((current.folder / "config.json").read_text())
    assert "untrained" not in config["specplug"] and config["specplug"]["round"] == 1
    assert config["specplug"]["dev_chain_tau"] == facts["chain_tau"]
    assert sorted(os.listdir(current.folder)) == ["config.json", "model.safetensors"]
    assert not (head / "learning").exists()
    assert json.loads((head / "learn.jsonl").read_text())["published_version"] == 2
    # All shards are read: the next round has nothing to do.
    assert learner.plan() is None and make_learner(target, ring, head).plan() is None
    recorded_from(answered.take(list(range(60, 96))), ring)
    monkeypatch.setattr(learning, "is_better", lambda _: True)
    monkeypatch.setattr(learning, "WORST_ON_OLD", 10.0)
    outcome = learner.run(learner.plan())
    assert outcome.plan.replayed and outcome.facts["old_tree_tau"] > 1 and outcome.published is None
    assert read_current(head).version == 2


@pytest.mark.slow
def test_a_head_that_is_not_better_is_not_published(target, ring, tmp_path, monkeypatch):
    head = new_drafter(target, tmp_path / "head")
    learner = make_learner(target, ring, head, from_nothing=replace(QUICK, epochs=1, lr=1e-9))
    monkeypatch.setattr(learning, "load_trained", lambda path: load_trained(str(current_folder(head))))
    outcome = learner.run(learner.plan())
    assert outcome.published is None and read_current(head).version == 1
    assert "not published" in cli.load("vllm_specplug.proposers.training.learn").describe(outcome)
    # The next rounds wait for more, also in another process.
    assert learner.patience == make_learner(target, ring, head).patience == 2
    learner.state.misses = 9
    assert learner.patience == 4


def test_held_out_answers_are_the_newest_and_never_trained_on(target, ring, tmp_path, monkeypatch):
    head = new_drafter(target, tmp_path / "head")
    learner, seen = make_learner(target, ring, head), []
    monkeypatch.setattr(
        learning, "train", lambda task, data, *_: seen.append(data) or task.export(str(learner.work), {})
    )
    measured = []
    monkeypatch.setattr(
        learning, "measure", lambda _head, data, *_: measured.append(data) or comparison.HeldOut([], [])
    )
    learner.run(learner.plan())
    everything = load_features(shard_files(ring))
    trained = {tuple(answer.ids) for answer in learning.answers_of(seen[0])}
    held = [tuple(answer.ids) for answer in learning.answers_of(measured[0])]
    newest = [tuple(answer.ids) for answer in learning.answers_of(everything)][-len(held) :]
    assert held == newest and len(held) >= comparison.MIN_ANSWERS and not trained.intersection(held)


@pytest.mark.slow
def test_deleted_and_damaged_shards_are_tolerated(target, ring, tmp_path):
    head = new_drafter(target, tmp_path / "head")
    learner = make_learner(target, ring, head)
    plan = learner.plan()
    first, second, _ = shard_files(ring)
    first.unlink()
    second.write_bytes(b"damaged")
    outcome = learner.run(plan)
    assert outcome.facts["answers"] < 32


def test_too_few_answers_are_skipped(target, answered, tmp_path):
    recorded_from(answered.take(list(range(9))), tmp_path / "ring")
    learner = make_learner(target, str(tmp_path / "ring"), new_drafter(target, tmp_path / "head"))
    outcome = learner.run(learner.plan())
    assert "skipped" in outcome.facts and read_current(tmp_path / "head").version == 1


def command(target, ring, head, *more):
    return ["learn", ring, "--target", target, "--out", str(head), "--nice", "0", *more]


@pytest.mark.slow
def test_a_killed_learner_goes_on_with_its_round(target, ring, tmp_path):
    head = new_drafter(target, tmp_path / "head")
    code = """
import functools, sys
from vllm_specplug.cli.cli import main
from vllm_specplug.proposers.training import learning
learning.RunSettings = functools.partial(learning.RunSettings, save_every_s=1.0)
sys.exit(main(sys.argv[1:]))
"""
    arguments = command(target, ring, head, "--once", "--epochs", "100000")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment)
    end = time.monotonic() + 240
    while not (head / "learning/training_state.pt").exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    process.kill()
    assert process.wait(timeout=120) == -signal.SIGKILL
    assert read_current(head).version == 1
    assert json.loads((head / "learn.json").read_text())["plan"]["number"] == 1
    saved = torch.load(head / "learning/training_state.pt", weights_only=True)["step"]
    assert saved > 0
    plan = make_learner(target, ring, head).plan()
    assert plan.number == 1 and (head / "learning/training_state.pt").exists()


def test_one_learner_at_a_time(target, ring, tmp_path, capsys):
    head = new_drafter(target, tmp_path / "head")
    with cli.load("vllm_specplug.proposers.training.learn")._only_learner(head):
        assert cli.main(command(target, ring, head, "--once")) == 2
    assert "another `specplug learn`" in capsys.readouterr().err


def test_a_learner_without_a_drafter_or_answers_says_what_to_do(target, ring, tmp_path, capsys):
    assert cli.main(command(target, ring, tmp_path / "head", "--once")) == 2
    assert "--model" in capsys.readouterr().err
    assert cli.main(command(target, str(tmp_path), tmp_path / "head", "--once")) == 2
    assert "record" in capsys.readouterr().err


def test_the_vocabulary_takes_in_what_the_answers_have():
    answers = [Answer("", [9], [70, 70, 71, 2])]
    ids = adapted_vocabulary(torch.arange(0, 40, 4), answers, [2])
    assert ids.tolist() == [0, 2, 4, 8, 12, 16, 20, 24, 70, 71]
    assert adapted_vocabulary(torch.arange(80), answers, [2]).tolist() == list(range(80))


def test_a_gain_must_be_above_two_standard_errors():
    base = comparison.HeldOut([(30, 20)] * 10, [(30, 15)] * 10)
    better = comparison.HeldOut([(30, 15)] * 9 + [(30, 14)], [(30, 10)] * 10)
    noisy = comparison.HeldOut([(30, 10)] + [(30, 20)] * 9, [(30, 10)] * 10)
    assert comparison.is_better(comparison.compare(base, better))
    assert not comparison.is_better(comparison.compare(base, noisy))
    assert not comparison.is_better(comparison.compare(base, base))
    few = comparison.HeldOut(base.chain[:4], base.tree[:4]), comparison.HeldOut(better.chain[:4], better.tree[:4])
    assert not comparison.is_better(comparison.compare(*few))
