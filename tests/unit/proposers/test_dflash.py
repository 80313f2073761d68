"""Which heads that predict all positions at once are served, and how many positions they draft."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.doubles import dflash, published, tiny
from vllm_specplug.cli.inspection import command_of, inspect
from vllm_specplug.config import ConfigError, parse_options
from vllm_specplug.proposer import TargetInfo, find_method
from vllm_specplug.proposers.dflash.checkpoint import PAIRS_ARCHITECTURE
from vllm_specplug.proposers.eagle2.checkpoint import CheckpointError

TARGET = TargetInfo(tiny.HIDDEN, tiny.VOCAB, 2, torch.float32)


def configure(path, **options):
    given = parse_options({"method": "dflash_tree", "model": str(path), **options})
    return find_method("dflash_tree").model.configure(given, TARGET)


def test_positions_are_those_of_the_training(tmp_path):
    head = dflash.write(tmp_path / "head", positions=6)
    found = configure(head)
    assert (found.options.draft_depth, found.vllm_method, found.model) == (6, "dflash", str(head))
    assert configure(head, draft_depth=3).options.scratch_rows == 4
    with pytest.raises(ConfigError, match="was trained to predict 6 positions: use a lower draft_depth"):
        configure(head, draft_depth=7)
    assert configure(dflash.write(tmp_path / "unsaid", block_size=None)).options.draft_depth == 7


GIVEN = {"mask_token_id": 3, "target_layer_ids": [0, 1]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 99}, "vocabulary of 99, the target 160: it was trained for another model"),
        ({"dflash_config": GIVEN | {"mask_token_id": None}}, "mask_token_id None: add the id"),
        (
            {"dflash_config": GIVEN | {"target_layer_ids": [0, 9]}},
            "target_layer_ids \\[0, 9\\]: the target has layers 0",
        ),
        (
            {"dflash_config": GIVEN | {"target_layer_ids": [1]}},
            "combines 128 numbers, but 1 layers of the target have 64",
        ),
        ({"dflash_config": GIVEN | {"target_layer_ids": []}}, "target_layer_ids \\[\\]: the target has layers 0 to 1"),
        (
            {"hidden_size": 96, "dflash_config": GIVEN | {"use_aux_hidden_state": False}},
            "hidden size 96, the target 64",
        ),
        (
            {"layer_types": ["sliding_attention", "full_attention"]},
            "a head with and without sliding windows in its layers: .*vLLM's own method 'dflash' drafts chains",
        ),
        ({"architectures": ["LiLiCorrDraftModel"]}, "a LiLiCorr head: .*vLLM's own method 'dflash' drafts chains"),
        (
            {"architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text"},
            "a DSpark head with other layers than Qwen3's: .*vLLM's own method 'dspark' drafts chains",
        ),
        (
            {"architectures": ["Qwen3DSparkModel"], "markov_head_type": "gated"},
            "a DSpark head with markov_head_type 'gated': .*use one with 'vanilla'",
        ),
    ],
)
def test_heads_that_do_not_fit(tmp_path, changes, words):
    with pytest.raises(CheckpointError, match=words):
        configure(dflash.write(tmp_path, **changes))


@pytest.mark.parametrize("form", dflash.FORMS)
def test_forms(tmp_path, form):
    """As vLLM's method loads them, with as many positions as in the training."""
    path = dflash.write(tmp_path, form=dflash.FORMS[form])
    found = configure(path)
    assert (found.vllm_method, found.options.draft_depth) == ("dspark" if "DSpark" in form else "dflash", 4)
    assert found.config_entries.get("architectures") == ([PAIRS_ARCHITECTURE] if "DFlash 2" in form else None)
    assert inspect(str(path)).problem is None
    assert command_of(inspect(str(path)))["method"] == "dflash_tree"


def test_inspect_says_which_kinds_are_not_served(tmp_path):
    found = inspect(str(dflash.write(tmp_path / "second", architectures=["LiLiCorrDraftModel"])))
    assert found.problem.startswith("no: ") and "a LiLiCorr head" in found.problem


def test_another_kind(tmp_path):
    with pytest.raises(CheckpointError, match="is an EAGLE-1/2 or HASS head, and .*: the method 'eagle2' serves it"):
        configure(tiny.write_drafter(tmp_path))


def test_a_parallel_eagle_head(tmp_path):
    tensors = load_file(tiny.write_eagle3_drafter(tmp_path / "eagle3") / "model.safetensors")
    config = json.loads((tmp_path / "eagle3" / "config.json").read_text())
    state = published.with_a_mask(config, tensors)
    found = configure(tiny._write(tmp_path / "peagle", config, state))
    assert (found.vllm_method, found.options.draft_depth, found.config_entries["ptd_token_id"]) == ("eagle3", 7, 3)
    with pytest.raises(CheckpointError, match="mask_token_id 160: add the id"):
        configure(tiny._write(tmp_path / "bad", config | {"ptd_token_id": tiny.VOCAB}, state))
    with pytest.raises(CheckpointError, match="hidden size 96, the target 64"):
        configure(tiny._write(tmp_path / "wide", config | {"hidden_size": 96}, state))
