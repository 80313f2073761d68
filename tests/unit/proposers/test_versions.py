"""Which versions of a checkpoint can take the place of the one that a server uses."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.doubles import tiny
from vllm_specplug.proposers.eagle2.checkpoint import CheckpointError
from vllm_specplug.proposers.eagle2.versions import VersionCheck


def write(path, seed=1, **changes):
    tiny.write_drafter(path, seed, draft_vocab=changes.pop("draft_vocab", 96), bias=True)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    return path


def test_other_weights_and_another_draft_vocabulary_are_taken(tmp_path):
    check = VersionCheck(write(tmp_path / "old"))
    new = write(tmp_path / "new", 2, draft_vocab=80, torch_dtype="bfloat16", rms_norm_eps=9.999999747378752e-06)
    state = check.read(new)
    assert state["d2t"].shape == (80,) and torch.equal(
        state["fc.weight"], load_file(new / "model.safetensors")["fc.weight"]
    )


@pytest.mark.parametrize(
    ("old", "new", "served", "taken"),
    [
        ("this", "this", "", True),
        ("owner/this", "this", "", True),
        ("this", "owner/this", "", True),
        ("this", "that", "", False),
        ("this", "that", "models/that", True),
        (None, "that", "", True),
    ],
)
def test_the_target_that_it_was_trained_for(tmp_path, old, new, served, taken):
    """The name of the served folder is right too: a first version may have been trained elsewhere."""
    folders = [write(tmp_path / str(place), specplug={"target": name}) for place, name in enumerate((old, new))]
    check = VersionCheck(folders[0], served)
    if taken:
        assert check.read(folders[1])
    else:
        with pytest.raises(CheckpointError, match="trained for 'that', the drafter in use for 'this'"):
            check.read(folders[1])


@pytest.mark.parametrize(
    "change", [{"num_attention_heads": 2}, {"rope_theta": 5e5}, {"hidden_act": "gelu"}, {"norm_output": True}]
)
def test_another_computation_is_refused(tmp_path, change):
    check = VersionCheck(write(tmp_path / "old"))
    with pytest.raises(CheckpointError, match=f"says {next(iter(change))} .* restart the server"):
        check.read(write(tmp_path / "new", **change))


@pytest.mark.parametrize("nested", [False, True])
def test_other_layers_of_the_target_are_refused(tmp_path, nested):
    def head(name, ids):
        entry = {"eagle_aux_hidden_state_layer_ids": ids}
        return write(tmp_path / name, **({"eagle_config": entry} if nested else entry))

    check = VersionCheck(head("old", [0, 1, 2]))
    with pytest.raises(CheckpointError, match="the drafter in use .*restart the server"):
        check.read(head("new", [0, 1, 3]))
    assert check.read(head("same", [0, 1, 2]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(tmp_path, value):
    check = VersionCheck(write(tmp_path / "old"))
    file = write(tmp_path / "new") / "model.safetensors"
    tensors = load_file(file)
    tensors["fc.weight"][3, 5] = value
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"fc\.weight has values that are not finite"):
        check.read(tmp_path / "new")


def test_other_tensors_are_refused(tmp_path):
    check = VersionCheck(write(tmp_path / "old"))
    tiny.write_drafter(tmp_path / "whole", bias=True)
    with pytest.raises(CheckpointError, match="do not have the same tensors: d2t"):
        check.read(tmp_path / "whole")
