"""`specplug inspect` on every layout, and `specplug convert` on speculators checkpoints."""

import json

import pytest
import torch

from tests.doubles.trained import full_disk
from tests.unit.proposers.test_checkpoint import CONFIG, DRAFT, HIDDEN, VOCAB, eagle3_state, eagle_state, write
from vllm_specplug.cli import cli
from vllm_specplug.cli.inspection import inspect, render
from vllm_specplug.proposers.eagle2.checkpoint import CheckpointError, load_head, save_head, validate_checkpoint
from vllm_specplug.proposers.eagle3.speculators import convert

PROVENANCE = {
    "target": "Some-1B",
    "command": "specplug train hass",
    "commit": "0123456789abcdef",
    "answer_tokens": 1000,
    "prompts": 7,
    "steps": 30,
    "options": {"align_steps": 3, "distill_weight": 0.5},
    "dev_alpha": [0.5, 0.25],
    "dev_chain_tau": 1.75,
}
SPECULATORS = {
    "speculators_model_type": "eagle3",
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "org/Target-1B"}},
    "draft_vocab_size": DRAFT,
    "norm_before_residual": False,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    "transformer_layer_config": {k: v for k, v in CONFIG.items() if k not in ("architectures", "bias")},
}


def speculators_state():
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in eagle3_state().items()}
    return renamed | {"verifier_lm_head.weight": torch.zeros(VOCAB, HIDDEN), "t2d": renamed["t2d"].to(torch.uint8)}


def test_hass_head_with_its_provenance(tmp_path):
    found = inspect(str(write(tmp_path, {"specplug": PROVENANCE})))
    assert (found.kind, found.target, found.hidden_size, found.vocab_size) == ("eagle", "Some-1B", HIDDEN, VOCAB)
    assert (found.draft_vocab_size, found.alpha, found.tau) == (VOCAB, [0.5, 0.25], 1.75)
    assert found.num_parameters == sum(tensor.numel() for tensor in eagle_state().values())
    text = render(found)
    for words in (
        "EAGLE-1/2",
        "HASS, align-3, 0.5 x topk loss",
        "Some-1B (hidden size 16, vocabulary 60)",
        "the whole vocabulary",
        "1.75 (greedy chains",
        "0-alpha 0.50, 1-alpha 0.25",
        "1000 answer tokens of 7 prompts in 30 steps",
        "specplug train hass (commit 0123456789ab)",
    ):
        assert words in text


def test_official_head_without_any_record(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save(eagle_state(), tmp_path / "pytorch_model.bin")
    found = inspect(str(tmp_path))
    assert (found.kind, found.trained_as, found.alpha, found.tau) == ("eagle", None, None, None)
    assert render(found).count("not recorded") == 6


def test_eagle3_and_speculators(tmp_path):
    write(tmp_path / "a", {"draft_vocab_size": DRAFT}, eagle3_state())
    found = inspect(str(tmp_path / "a"))
    assert (found.kind, found.draft_vocab_size) == ("eagle3", DRAFT) and "20 of 60 ids (33%)" in render(found)
    save_head(tmp_path / "b", SPECULATORS, speculators_state())
    found = inspect(str(tmp_path / "b"))
    assert (found.kind, found.target, found.hidden_size) == ("eagle3", "org/Target-1B", HIDDEN)
    assert found.draft_vocab_size == DRAFT and "specplug convert" in found.problem
    assert "\nlayout      EAGLE-3, speculators format\n" in f"\n{render(found)}"


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_medusa(tmp_path, file):
    state = {f"{head}.0.linear.{kind}": torch.zeros(4, 4) for head in range(3) for kind in ("weight", "bias")}
    if file.endswith("safetensors"):
        save_head(tmp_path, {}, state)
        (tmp_path / "model.safetensors").rename(tmp_path / file)
    else:
        torch.save(state, tmp_path / file)
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "org/Base"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = inspect(str(tmp_path))
    assert (found.kind, found.target, found.layout) == ("medusa", "org/Base", "Medusa, 3 heads of 1 block(s)")
    assert "not recorded" in render(found)


def test_command(tmp_path, capsys):
    write(tmp_path / "head", {"specplug": PROVENANCE})
    target = tmp_path / "target"
    target.mkdir()
    config = {"hidden_size": HIDDEN, "vocab_size": VOCAB}
    (target / "config.json").write_text(json.dumps(config))
    assert cli.main(["inspect", str(tmp_path / "head"), "--target", str(target)]) == 0
    assert "fits" in capsys.readouterr().out
    assert cli.main(["inspect", str(tmp_path / "head"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tau"] == 1.75
    (target / "config.json").write_text(json.dumps(config | {"hidden_size": 32}))
    assert cli.main(["inspect", str(tmp_path / "head"), "--target", str(target)]) == 2
    assert "hidden size 16, the target 32" in capsys.readouterr().err
    assert cli.main(["inspect", "smollm2-135m-instruct"]) == 0  # a shipped drafter by its short name
    assert "SmolLM2-135M-Instruct (hidden size 576, vocabulary 49152)" in capsys.readouterr().out


def test_what_is_no_draft_checkpoint(tmp_path):
    save_head(tmp_path, {"vocab_size": 5}, {"q_proj.weight": torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match="not a draft checkpoint of a known layout .*and no language model"):
        inspect(str(tmp_path))


# ---- convert


def test_speculators_to_plain(tmp_path, capsys):
    save_head(tmp_path / "a", SPECULATORS, speculators_state())
    assert cli.main(["convert", str(tmp_path / "a"), "--out", str(tmp_path / "b")]) == 0
    info = validate_checkpoint(tmp_path / "b", HIDDEN, VOCAB, "eagle3")
    assert info.draft_vocab_size == DRAFT
    config, state = load_head(tmp_path / "b")
    expected = load_head(tmp_path / "a")[1]
    assert "verifier_lm_head.weight" not in state and state["t2d"].dtype == torch.bool
    for name, tensor in expected.items():
        if not name.startswith(("verifier", "t2d")):
            assert torch.equal(state[name.replace("layers.0.", "midlayer.")], tensor)
    assert (config["norm_before_residual"], config["norm_before_fc"]) == (False, False)
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert not (tmp_path / "b.partial").exists()


def test_the_formats_own_default_is_spelled_out(tmp_path):
    save_head(
        tmp_path / "a", {k: v for k, v in SPECULATORS.items() if k != "norm_before_residual"}, speculators_state()
    )
    convert(str(tmp_path / "a"), str(tmp_path / "b"))
    assert load_head(tmp_path / "b")[0]["norm_before_residual"] is True


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "dflash"}, "a DFlash drafter.*the method 'dflash_tree'"),
        ({"transformer_layer_config": None}, "lacks transformer_layer_config"),
        ({"transformer_layer_config": {"model_type": "gemma3"}}, "a 'gemma3' layer"),
        ({"transformer_layer_config": {"hidden_size": 4}}, "lacks intermediate_size"),
        ({"draft_vocab_size": 7}, "wrong shape: d2t expected"),
    ],
)
def test_what_cannot_be_converted_writes_nothing(tmp_path, changes, message):
    save_head(tmp_path / "a", SPECULATORS | changes, speculators_state())
    with pytest.raises(CheckpointError, match=message):
        convert(str(tmp_path / "a"), str(tmp_path / "b"))
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_convert_on_a_full_disk_or_onto_itself(tmp_path):
    save_head(tmp_path / "a", SPECULATORS, speculators_state())
    with full_disk(2048), pytest.raises(OSError, match="could not be written"):
        convert(str(tmp_path / "a"), str(tmp_path / "b"))
    with pytest.raises(CheckpointError, match="the checkpoint's own folder"):
        convert(str(tmp_path / "a"), str(tmp_path / "a"))
    assert [file.name for file in tmp_path.iterdir()] == ["a"]
