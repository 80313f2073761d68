"""The ring of recorded shards: format, limit, several writers, failures."""

import contextlib
import json
import logging
import multiprocessing
import os
import stat
import time

import pytest
import torch

from tests.doubles.trained import HIDDEN, VOCAB, full_disk, make_answers, make_features
from vllm_specplug.cli import cli
from vllm_specplug.proposers.training import eagle, recorded
from vllm_specplug.proposers.training.initialise import linear_predictor
from vllm_specplug.proposers.training.recorded import Facts, RecordedAnswer, ShardWriter, read_recorded, shard_files
from vllm_specplug.proposers.training.trainer import RunSettings, train

FACTS = Facts("target", HIDDEN, VOCAB)


def answer(number: int, length: int = 12, width: int = HIDDEN) -> RecordedAnswer:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
    return RecordedAnswer(ids, 4, list(torch.randn(length - 1, width, generator=generator).split(5)), number)


def write(folder, answers, limit=1 << 20, facts=FACTS):
    writer = ShardWriter(folder, limit, facts)
    for one in answers:
        assert writer.add(one)
    writer.close()
    return writer


def recorded_from(data, folder, shards=1):
    """Record the sequences of a feature set, as a server does: without the last hidden state."""
    for part in torch.arange(len(data)).chunk(shards):
        ends = data.starts + data.lengths
        rows = [(int(data.starts[i]), int(ends[i]), int(data.prompt_lengths[i])) for i in part.tolist()]
        facts = Facts("target", data.features.shape[1], int(data.ids.max()) + 1)
        answers = [RecordedAnswer(data.ids[a:b].tolist(), p, [data.features[a : b - 1]]) for a, b, p in rows]
        write(folder, answers, 1 << 24, facts)


def test_shards_have_the_format_of_the_data_command(tmp_path):
    answers = [answer(n, 8 + n) for n in range(5)]
    write(tmp_path / "ring", answers)
    data = read_recorded(tmp_path / "ring", VOCAB)
    assert data.lengths.tolist() == [8, 9, 10, 11, 12] and data.prompt_lengths.tolist() == [4] * 5
    for one, start, length in zip(answers, data.starts.tolist(), data.lengths.tolist(), strict=True):
        assert data.ids[start : start + length].tolist() == one.ids
        assert torch.equal(data.features[start : start + length - 1], torch.cat(one.features).bfloat16())
        assert not data.features[start + length - 1].any()
    assert [one.ids for one in recorded.answers_of(data)] == [one.ids for one in answers]
    (file,) = shard_files(tmp_path / "ring")
    with recorded.safe_open(str(file), framework="pt") as shard:
        assert shard.get_tensor("first_positions").tolist() == [0, 1, 2, 3, 4]


def test_only_the_owner_can_read(tmp_path):
    old = os.umask(0)
    try:
        write(tmp_path / "ring", [answer(0)])
    finally:
        os.umask(old)
    for folder, _, files in os.walk(tmp_path / "ring"):
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        assert files
        for file in files:
            assert stat.S_IMODE(os.stat(os.path.join(folder, file)).st_mode) == 0o600


def test_no_trainer_reads_the_missing_last_hidden_state(target, tmp_path):
    """Training on a server's recorded answers gives the weights that training on `specplug data` gives."""
    data = make_features(target, make_answers(), tmp_path / "features")
    recorded_from(data, tmp_path / "ring")
    found = read_recorded(tmp_path / "ring", VOCAB)
    assert not torch.equal(found.features, data.features)
    embedding = torch.randn(VOCAB, HIDDEN)
    predictors = [linear_predictor(one, embedding, seed=0, ridge=0.01) for one in (data, found)]
    assert torch.equal(*predictors)
    options = eagle.EagleOptions(epochs=1, batch_tokens=96, draft_vocab_size=30)
    heads, start = [], eagle.EagleTask(target, torch.arange(30), options).head.state_dict()
    for features in (data, found):
        task = eagle.EagleTask(target, torch.arange(30), options)
        # Scales are means over all rows, which differ a little.
        task._input_scale = lambda _: torch.ones(2 * HIDDEN)
        task._initialise = lambda _, head=task.head: head.load_state_dict(start)
        out = tmp_path / str(len(heads))
        heads.append(train(task, features, str(out), RunSettings(progress=False)))
    for name, weight in heads[0].state_dict().items():
        assert torch.equal(weight, heads[1].state_dict()[name]), name


@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_trainers_take_a_recorded_folder_without_the_target_running(target, tmp_path, method, monkeypatch):
    recorded_from(make_features(target, make_answers(), tmp_path / "features"), tmp_path / "ring", shards=2)
    monkeypatch.setattr("vllm_specplug.proposers.training.features._load_target", pytest.fail)
    command = ["train", method, "--target", target, "--data", str(tmp_path / "ring"), "--out", str(tmp_path / "out")]
    assert cli.main([*command, "--epochs", "1", "--traceback"]) == 0
    facts = json.loads((tmp_path / "out" / "config.json").read_text())["specplug"]
    assert facts["prompts"] == len(make_answers())


def test_a_head_from_recorded_answers_is_measured_on_others(target, tmp_path):
    recorded_from(make_features(target, make_answers(), tmp_path / "features"), tmp_path / "ring")
    dev = tmp_path / "dev.jsonl"
    dev.write_text("".join(json.dumps({"source": "dev", **vars(row)}) + "\n" for row in make_answers()[:8]))
    command = ["train", "eagle", "--target", target, "--data", str(tmp_path / "ring"), "--out", str(tmp_path / "out")]
    assert cli.main([*command, "--dev-answers", str(dev), "--epochs", "1", "--traceback"]) == 0
    facts = json.loads((tmp_path / "out" / "config.json").read_text())["specplug"]
    assert facts["dev_chain_tau"] >= 1.0


def test_the_oldest_shards_are_deleted_at_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded, "SHARD_ANSWERS", 1)
    limit = 6000
    write(tmp_path / "ring", [answer(n) for n in range(30)], limit)
    files = shard_files(tmp_path / "ring")
    assert limit / 2 < sum(file.stat().st_size for file in files) <= limit
    assert [one.ids for one in recorded.answers_of(read_recorded(tmp_path / "ring", VOCAB))] == [
        answer(n).ids for n in range(30 - len(files), 30)
    ]


def test_a_shard_larger_than_the_limit_is_left_out(tmp_path):
    writer = write(tmp_path / "ring", [answer(0, 400)], 2000)
    assert not writer.failed and shard_files(tmp_path / "ring") == []


def _record(folder, first, count, both_started):
    make_room = ShardWriter._make_room

    def alone(self, size):
        with open(self.folder / "inside", "x"):  # fails if the other server is here too
            time.sleep(0.02)
        (self.folder / "inside").unlink()
        return make_room(self, size)

    recorded.SHARD_ANSWERS, ShardWriter._make_room = 1, alone
    both_started.wait(120)
    assert not write(folder, [answer(n) for n in range(first, first + count)], 6000).failed


@pytest.mark.slow
def test_two_servers_on_one_folder_keep_to_the_limit_and_lose_nothing_else(tmp_path):
    folder, context, most = tmp_path / "ring", multiprocessing.get_context("forkserver"), 0
    context.set_forkserver_preload([__name__])  # imported once for both
    both_started = context.Barrier(2)
    servers = [context.Process(target=_record, args=(folder, 100 * n, 40, both_started)) for n in range(2)]
    for server in servers:
        server.start()
    while any(server.is_alive() for server in servers):
        with contextlib.suppress(FileNotFoundError):
            most = max(most, sum(file.stat().st_size for file in shard_files(folder)))
        time.sleep(0.002)
    assert [server.exitcode for server in servers] == [0, 0] and 0 < most <= 6000
    names = [file.name for file in shard_files(folder)]
    found = [one.ids for one in recorded.answers_of(read_recorded(folder, VOCAB))]
    known = [answer(n).ids for n in (*range(40), *range(100, 140))]
    assert len(found) == len(names) and all(ids in known for ids in found)


def test_a_full_disk_ends_the_recording_with_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(recorded, "SHARD_ANSWERS", 1)
    writer = ShardWriter(tmp_path / "ring", 1 << 20, FACTS)
    writer.add(answer(0))
    while not shard_files(tmp_path / "ring"):
        time.sleep(0.01)
    with full_disk(100), caplog.at_level(logging.WARNING):
        writer.add(answer(1))
        while not writer.failed:
            time.sleep(0.01)
        assert not writer.add(answer(2))
        writer.close()
    assert len([row for row in caplog.records if "serving goes on" in row.message]) == 1
    assert len(read_recorded(tmp_path / "ring", VOCAB)) == 1
    assert [file.name for file in (tmp_path / "ring/features").iterdir()] == [shard_files(tmp_path / "ring")[0].name]


def test_a_disk_that_is_full_at_the_end_does_not_hold_it_up(tmp_path):
    writer = ShardWriter(tmp_path / "ring", 1 << 20, FACTS)
    writer.add(answer(0))
    with full_disk(100):
        writer.close()
    assert writer.failed and shard_files(tmp_path / "ring") == []


def test_what_a_killed_server_left_is_removed(tmp_path):
    write(tmp_path / "ring", [answer(0)])
    leftover = tmp_path / "ring/features/.shard-1.safetensors"
    leftover.write_bytes(b"half")
    assert len(read_recorded(tmp_path / "ring", VOCAB)) == 1
    write(tmp_path / "ring", [answer(1)])
    assert not leftover.exists()


def test_answers_are_dropped_while_too_many_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded, "WAITING_BYTES", 4000)
    writer = ShardWriter(tmp_path / "ring", 1 << 20, FACTS)
    taken = [writer.add(answer(n)) for n in range(20)]
    assert True in taken and False in taken
    writer.close()
    assert writer._waiting == 0
    assert len(read_recorded(tmp_path / "ring", VOCAB)) == sum(taken)


def test_an_open_shard_is_written_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded, "SHARD_SECONDS", 0.05)
    writer = ShardWriter(tmp_path / "ring", 1 << 20, FACTS)
    writer.add(answer(0))
    end = time.monotonic() + 60
    while not shard_files(tmp_path / "ring") and time.monotonic() < end:
        time.sleep(0.01)
    assert shard_files(tmp_path / "ring")
    writer.close()


@pytest.mark.parametrize("damage", ["cut", "nan", "ids", "lengths"])
def test_a_damaged_shard_is_left_out(tmp_path, damage, caplog):
    write(tmp_path / "ring", [answer(0)])
    (file,) = shard_files(tmp_path / "ring")
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-40])
    else:
        data = recorded.load_features([file])
        features, ids, lengths = data.features.clone(), data.ids.clone(), data.lengths.clone()
        features[3, 3] = float("nan") if damage == "nan" else 0
        ids[0] += VOCAB * (damage == "ids")
        lengths -= int(damage == "lengths")
        named = {"features": features, "ids": ids.int(), "lengths": lengths.int()}
        file.write_bytes(recorded.save({**named, "prompt_lengths": data.prompt_lengths.int()}))
    write(tmp_path / "ring", [answer(1)])
    with caplog.at_level(logging.WARNING):
        assert [one.ids for one in recorded.answers_of(read_recorded(tmp_path / "ring", VOCAB))] == [answer(1).ids]
    assert file.name in caplog.text


def test_answers_of_another_target_are_refused(tmp_path):
    write(tmp_path / "ring", [answer(0)])
    with pytest.raises(ValueError, match="another target"):
        ShardWriter(tmp_path / "ring", 1 << 20, Facts("other", HIDDEN, VOCAB))
    with pytest.raises(ValueError, match="start a server"):
        recorded.read_facts(tmp_path)
