"""Heads made from published configurations, at small sizes: the command that serves each, or the reason of a refusal.

Each has the keys and names of tensors of its repository or of the program that exported it; no weights were at hand.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.doubles import dflash, mtp, published, tiny
from tests.unit.proposers.test_checkpoint import CONFIG, DRAFT, HIDDEN, VOCAB, eagle3_state
from tests.unit.proposers.test_kinds import (
    AUX,
    LAYERS,
    full_vocabulary,
    more_layers,
    narrow_state,
    norms_of_queries_and_keys,
    of_the_last_state,
    renamed,
    without,
)
from vllm_specplug.cli import cli
from vllm_specplug.proposers.eagle2.checkpoint import save_head

SAFE_AI_LAB = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": DRAFT,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
SPEC_FORGE = SAFE_AI_LAB | {"head_dim": 4, "eagle_config": {AUX: [1, 11, 21], "use_aux_hidden_state": True}}
MODEL_OPT = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT, "head_dim": 4}
EMBEDDING = {"embed_tokens.weight": torch.zeros(VOCAB, HIDDEN)}
QWEN3 = {"model_type": "qwen3", "head_dim": 4}


def speculators(layer=None, **entries):
    """The config of a head of vllm-project/speculators."""
    geometry = {name: value for name, value in CONFIG.items() if name not in ("architectures", "bias")}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "org/Target", "architectures": ["LlamaForCausalLM"]},
        },
        "draft_vocab_size": DRAFT,
        "norm_before_residual": True,
        AUX: [2, 18, 33],
        "transformer_layer_config": geometry | (layer or {}),
        "bias": None,
        **entries,
    }


#: Repository, or exporter: config and tensors of its EAGLE-3 head.
EAGLE3 = {
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": (SAFE_AI_LAB, eagle3_state()),
    "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B": (
        SAFE_AI_LAB | {"hidden_size": 8, "head_dim": 4, "target_hidden_size": HIDDEN, "draft_vocab_size": VOCAB},
        narrow_state(8, HIDDEN),
    ),
    "AngelSlim/Qwen3-8B_eagle3": (SAFE_AI_LAB | {"head_dim": 4}, eagle3_state() | EMBEDDING),
    "nvidia/Llama-4-Maverick-17B-128E-Eagle3": (SAFE_AI_LAB, eagle3_state()),
    "SpecForge, gpt-oss-20b": (SPEC_FORGE, eagle3_state() | EMBEDDING),
    "SpecForge, EAGLE-3.1": (
        SPEC_FORGE | {"fc_norm": True, "norm_output": True},
        eagle3_state() | {f"fc_norm.{number}.weight": torch.ones(HIDDEN) for number in range(3)},
    ),
    "RedHatAI/Qwen3-8B-speculator.eagle3": (speculators(), renamed(eagle3_state()) | EMBEDDING),
    "RedHatAI/gemma-4-31B-it-speculator.eagle3": (speculators(), renamed(eagle3_state()) | EMBEDDING),
    "RedHatAI/gpt-oss-20b-speculator.eagle3": (
        speculators(norm_before_fc=True),
        renamed(eagle3_state()) | EMBEDDING | {"input_norm.weight": torch.ones(3 * HIDDEN)},
    ),
    "speculators, a Qwen3 layer": (
        speculators(QWEN3),
        renamed(eagle3_state()) | norms_of_queries_and_keys("layers.0"),
    ),
    "speculators, two layers": (
        speculators({"num_hidden_layers": 2}),
        more_layers(renamed(eagle3_state()), 2),
    ),
    "NVIDIA ModelOpt, 2026": (
        MODEL_OPT | {"eagle_config": {AUX: [1, 17, 32], "use_aux_hidden_state": True}},
        renamed(eagle3_state()),
    ),
    "nvidia/gpt-oss-120b-Eagle3-v2": (
        MODEL_OPT | {"eagle_config": {AUX: [], "use_aux_hidden_state": False}},
        of_the_last_state(eagle3_state()),
    ),
    "the target's vocabulary, without an LM head": (
        SAFE_AI_LAB | {"draft_vocab_size": VOCAB},
        without(full_vocabulary(eagle3_state()), "lm_head.weight"),
    ),
    "four aux layers": (
        SAFE_AI_LAB | {AUX: [2, 10, 18, 27]},
        eagle3_state() | {"fc.weight": torch.randn(HIDDEN, 4 * HIDDEN)},
    ),
}


def inspected(path: Path, target: Path, capsys: pytest.CaptureFixture) -> str:
    """What `specplug inspect` prints of a head that fits."""
    assert cli.main(["inspect", str(path), "--target", str(target)]) == 0
    return capsys.readouterr().out


def served(text: str) -> dict:
    """The speculative config that it prints."""
    line = next(line for line in text.splitlines() if line.startswith("served"))
    return json.loads(shlex.split(line)[2])


def small_target(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text(
        json.dumps({"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": LAYERS + 6})
    )
    return path


@pytest.mark.parametrize("name", EAGLE3)
def test_eagle3(tmp_path, capsys, name):
    head, (config, state) = tmp_path / "head", EAGLE3[name]
    save_head(head, config if "transformer_layer_config" in config else CONFIG | config, state)
    text = inspected(head, small_target(tmp_path / "target"), capsys)
    assert served(text) == {"method": "eagle2", "model": str(head)}
    assert "\nlayout      EAGLE-3" in f"\n{text}" and "fits        " in text


#: Repository, or exporter: form of a head that predicts all positions in one forward.
BLOCKS = {
    "z-lab/Qwen3-8B-DFlash-b16": dflash.PLAIN,
    "z-lab, sliding windows": dflash.FORMS["windows of blocks"],
    "SpecForge, DFlash": dflash.FORMS["windows"],
    "RedHatAI, DFlash": dflash.FORMS["DFlash, speculators"],
    "RedHatAI, DFlash 2": dflash.FORMS["DFlash 2, speculators"],
    "SpecForge, DFlash 2": dflash.FORMS["DFlash 2"],
    "deepseek-ai/dspark_qwen3_8b_block7": dflash.FORMS["DSpark"],
    "RedHatAI, DSpark": dflash.FORMS["DSpark, speculators"],
}


@pytest.fixture
def target(tmp_path) -> Path:
    return tiny.write_target(tmp_path / "target")


@pytest.mark.parametrize("name", BLOCKS)
def test_all_positions_in_one_forward(tmp_path, target, capsys, name):
    head = dflash.write(tmp_path / "head", form=BLOCKS[name])
    text = inspected(head, target, capsys)
    assert served(text) == {"method": "dflash_tree", "model": str(head)} and "fits        " in text


@pytest.mark.parametrize("is_speculators", [False, True])
def test_peagle(tmp_path, target, capsys, is_speculators):
    """amazon/GPT-OSS-20B-P-EAGLE; RedHatAI's in the speculators format."""
    source = tiny.write_eagle3_drafter(tmp_path / "source")
    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    state = published.with_a_mask(config, tensors)
    if is_speculators:
        state = published.as_speculators(config, state)
        config |= {"speculators_model_type": "peagle", "mask_token_id": 3, "architectures": ["PEagleDraftModel"]}
        config["transformer_layer_config"].pop("ptd_token_id")
    head = tiny._write(tmp_path / "head", config, state)
    text = inspected(head, target, capsys)
    assert served(text) == {"method": "dflash_tree", "model": str(head)} and "a P-EAGLE head" in text


def test_xpress_is_refused(tmp_path, target, capsys):
    head = dflash.write(tmp_path / "head", architectures=["XPressDraftModel"])
    assert cli.main(["inspect", str(head)]) == 0
    assert "no: " in (text := capsys.readouterr().out)
    assert "an XPress drafter, which drafts all positions in one forward" in text and "no release of vLLM" in text


@pytest.mark.parametrize("name", ["MiMo", "GLM-4 MoE", "EXAONE MoE", "Qwen3-Next"])
def test_mtp_layers_of_a_target(tmp_path, target, capsys, name):
    folder = mtp.write_with_mtp(tmp_path / "own", name)
    assert cli.main(["inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    assert served(text) == {"method": "mtp_tree"} and "layout      MTP layers" in text
    assert cli.main(["inspect", str(folder), "--target", str(target)]) == 2
    assert "draft for that model only: serve it" in capsys.readouterr().err


def test_mtp_layers_alone(tmp_path, capsys):
    config = CONFIG | {"architectures": ["DeepSeekMTPModel"], "model_type": "deepseek_mtp"}
    save_head(
        tmp_path, config, {"layers.61.eh_proj.weight": torch.zeros(4, 8), "layers.61.enorm.weight": torch.ones(4)}
    )
    assert cli.main(["inspect", str(tmp_path)]) == 0
    assert "no: " in (text := capsys.readouterr().out) and "vLLM's own method 'mtp' drafts chains" in text


def test_a_small_model(tmp_path, target, capsys):
    small = tiny.write_sibling(tmp_path / "small", target)
    assert served(inspected(small, target, capsys)) == {"method": "draft_tree", "model": str(small)}
