"""The folder that a learning drafter is published in."""

import json
import os
from pathlib import Path

import pytest

from vllm_specplug.config import ConfigError, resolve_drafter
from vllm_specplug.utils import published
from vllm_specplug.utils.published import KEPT, current_folder, is_published, publish, read_current


def writer(text):
    def write(folder: Path) -> None:
        (folder / "config.json").write_text(text)

    return write


def test_published_versions_count_up_and_the_pointer_names_the_newest(tmp_path):
    assert not is_published(tmp_path)
    for number in (1, 2):
        done = publish(tmp_path, writer(str(number)), {"chain_tau": number / 2})
        assert done == read_current(tmp_path)
        assert (done.version, done.facts) == (number, {"chain_tau": number / 2})
        assert current_folder(tmp_path) == tmp_path / f"versions/{number:06d}"
        assert (current_folder(tmp_path) / "config.json").read_text() == str(number)
    assert sorted(os.listdir(tmp_path)) == ["current.json", "versions"]
    assert resolve_drafter(str(tmp_path)) == tmp_path / "versions/000002"


def test_a_folder_without_a_pointer_is_a_checkpoint_itself(tmp_path):
    assert current_folder(tmp_path) == tmp_path == resolve_drafter(str(tmp_path))


def test_old_versions_are_deleted(tmp_path):
    for number in range(KEPT + 2):
        publish(tmp_path, writer(str(number)), {})
    assert sorted(os.listdir(tmp_path / "versions")) == [f"{n:06d}" for n in (3, 4, 5)]


@pytest.mark.parametrize("place", ["write", "rename", "replace"])
def test_a_failure_leaves_the_current_version_as_it_is(tmp_path, monkeypatch, place):
    publish(tmp_path, writer("first"), {})
    before = (tmp_path / "current.json").read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    write = fail if place == "write" else writer("second")
    if place != "write":
        monkeypatch.setattr(published.os, place, fail)
    with pytest.raises(OSError, match="No space left"):
        publish(tmp_path, write, {})
    monkeypatch.undo()
    assert (tmp_path / "current.json").read_bytes() == before
    assert (current_folder(tmp_path) / "config.json").read_text() == "first"
    assert not list(tmp_path.glob(".*")) and not list(tmp_path.glob("versions/.*"))
    assert publish(tmp_path, writer("third"), {}).version > 1


def test_what_a_killed_writer_left_is_removed_and_never_read(tmp_path):
    publish(tmp_path, writer("first"), {})
    (tmp_path / "versions/.new-000002").mkdir()
    (tmp_path / "versions/.new-000002/config.json").write_text("hal")
    assert read_current(tmp_path).version == 1
    done = publish(tmp_path, writer("second"), {})
    assert (done.folder / "config.json").read_text() == "second"
    assert not list(tmp_path.glob("versions/.*"))


@pytest.mark.parametrize(
    "pointer",
    [
        "{",
        "[]",
        "{}",
        json.dumps({"version": 1, "path": "../elsewhere", "published": ""}),
        json.dumps({"version": 2, "path": "versions/000001", "published": ""}),
        json.dumps({"version": 9, "path": "versions/000009", "published": ""}),
    ],
)
def test_a_damaged_pointer_is_refused(tmp_path, pointer):
    publish(tmp_path, writer("first"), {})
    (tmp_path / "current.json").write_text(pointer)
    with pytest.raises(ValueError, match=r"current\.json"):
        read_current(tmp_path)
    with pytest.raises(ConfigError, match=r"current\.json"):
        resolve_drafter(str(tmp_path))
