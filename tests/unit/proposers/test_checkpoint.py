"""Draft checkpoints: both layouts, both file formats, and the message of each refusal."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from vllm_specplug.proposers.eagle2.checkpoint import (
    CheckpointError,
    load_head,
    offsets,
    save_head,
    target_ids,
    validate_checkpoint,
)

HIDDEN, VOCAB, DRAFT, INNER = 16, 60, 20, 24
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "bias": False,
}


def eagle_state(prefix="layers.0", layer_input=HIDDEN, fc_input=2 * HIDDEN):
    return {
        "fc.weight": torch.randn(HIDDEN, fc_input),
        f"{prefix}.self_attn.q_proj.weight": torch.randn(16, layer_input),
        f"{prefix}.self_attn.k_proj.weight": torch.randn(8, layer_input),
        f"{prefix}.self_attn.v_proj.weight": torch.randn(8, layer_input),
        f"{prefix}.self_attn.o_proj.weight": torch.randn(HIDDEN, 16),
        f"{prefix}.mlp.gate_proj.weight": torch.randn(INNER, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": torch.randn(INNER, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": torch.randn(HIDDEN, INNER),
        f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN),
    }


def eagle3_state():
    return eagle_state("midlayer", 2 * HIDDEN, 3 * HIDDEN) | {
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        "midlayer.input_layernorm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": torch.randn(DRAFT, HIDDEN),
        "d2t": offsets(torch.arange(DRAFT) * 3),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool),
    }


def write(path, config=None, state=None):
    save_head(path, CONFIG | (config or {}), eagle_state() if state is None else state)
    return path


def refusal(path, hidden=HIDDEN, vocab=VOCAB, **options) -> str:
    with pytest.raises(CheckpointError) as caught:
        validate_checkpoint(path, hidden, vocab, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_round_trip_of_an_eagle_head(tmp_path):
    state = eagle_state()
    config, loaded = load_head(write(tmp_path / "head", state=state))
    assert config == CONFIG
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    assert not list((tmp_path / "head").glob("*.tmp"))
    info = validate_checkpoint(tmp_path / "head", HIDDEN, VOCAB)
    assert (info.kind, info.draft_vocab_size, info.has_bias, info.has_d2t) == ("eagle", VOCAB, False, False)


def test_reduced_vocabulary_bias_and_embedding(tmp_path):
    ids = torch.arange(DRAFT) * 2 + 1
    extra = {"d2t": offsets(ids), "fc.bias": torch.zeros(HIDDEN), "embed_tokens.weight": torch.zeros(VOCAB, HIDDEN)}
    info = validate_checkpoint(write(tmp_path, {"draft_vocab_size": DRAFT}, eagle_state() | extra), HIDDEN, VOCAB)
    assert (info.draft_vocab_size, info.has_bias, info.has_embed_tokens, info.has_d2t) == (DRAFT, True, True, True)
    assert torch.equal(target_ids(load_head(tmp_path)[1]["d2t"]), ids)


def test_official_pickle_with_prefixed_names(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    state = eagle_state()
    torch.save({f"model.{name}": tensor for name, tensor in state.items()}, tmp_path / "pytorch_model.bin")
    assert validate_checkpoint(tmp_path, HIDDEN, VOCAB).kind == "eagle"
    assert torch.equal(load_head(tmp_path)[1]["fc.weight"], state["fc.weight"])


def test_eagle3_layout_is_detected(tmp_path):
    write(tmp_path, {"draft_vocab_size": DRAFT}, eagle3_state())
    info = validate_checkpoint(tmp_path, HIDDEN, VOCAB)
    assert (info.kind, info.draft_vocab_size, info.has_lm_head) == ("eagle3", DRAFT, True)
    assert "'eagle' is needed" in refusal(tmp_path, expected_kind="eagle")


def test_path_missing(tmp_path):
    assert "is not a folder: check the path" in refusal(tmp_path / "nowhere")


def test_path_is_a_file(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "give the folder that holds config.json" in refusal(tmp_path / "model.safetensors")


def test_config_missing(tmp_path):
    assert "has no config.json" in refusal(tmp_path)


@pytest.mark.parametrize(("text", "message"), [("{", "is not valid JSON"), ("[1]", "must hold one JSON object")])
def test_config_malformed(tmp_path, text, message):
    write(tmp_path)
    (tmp_path / "config.json").write_text(text)
    assert message in refusal(tmp_path)


def test_config_lacks_fields(tmp_path):
    write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": HIDDEN}))
    assert "lacks intermediate_size, num_attention_heads, vocab_size" in refusal(tmp_path)


D2T = {"draft_vocab_size": DRAFT}
#: Changes of the config, tensors, and a part of the message; the target has a hidden size of 16 and 60 tokens.
REFUSED = [
    ({"num_hidden_layers": 30}, {}, "says num_hidden_layers 30, the weights have 1 layer"),
    ({"bias": True, **D2T}, {}, "lacks 2 tensor(s): d2t, fc.bias"),
    ({}, {"fc.weight": torch.zeros(HIDDEN, HIDDEN)}, "fc.weight expected [16, 32], found [16, 16]"),
    ({"vocab_size": 61}, {}, "has a vocabulary of 61, the target 60"),
    ({"hidden_size": 32}, {}, "has hidden size 32, the target 16"),
    (D2T, {"d2t": offsets(torch.zeros(DRAFT, dtype=torch.long))}, "maps two draft ids to one target id"),
    (D2T, {"d2t": offsets(torch.arange(DRAFT) - 1)}, "d2t points outside the target's vocabulary of 60"),
    (
        D2T,
        {"d2t": offsets(torch.arange(DRAFT) + VOCAB - DRAFT + 1)},
        "d2t points outside the target's vocabulary of 60",
    ),
]


@pytest.mark.parametrize(("config", "tensors", "message"), REFUSED)
def test_refused(tmp_path, config, tensors, message):
    assert message in refusal(write(tmp_path, config, eagle_state() | tensors))


def test_eagle3_for_another_target_width(tmp_path):
    write(tmp_path, D2T, eagle3_state())
    message = "reads a target of hidden size 16, this target has 32: it was trained for another model"
    assert message in refusal(tmp_path, hidden=32)


def test_missing_tensors_are_listed(tmp_path):
    state = eagle_state()
    del state["fc.weight"], state["layers.0.mlp.up_proj.weight"]
    assert "lacks 2 tensor(s): fc.weight, layers.0.mlp.up_proj.weight" in refusal(write(tmp_path, state=state))


def test_no_weights(tmp_path):
    write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "has no weights: neither model.safetensors nor pytorch_model.bin" in refusal(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 100, -10])
def test_truncated_safetensors(tmp_path, keep):
    file = write(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "is truncated or not a safetensors file" in refusal(tmp_path)
    with pytest.raises(CheckpointError, match="truncated"):
        load_head(tmp_path)


def test_safetensors_header_that_is_not_json(tmp_path):
    (write(tmp_path) / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"\xff\xfe\xfd\xfc")
    assert "is truncated or not a safetensors file" in refusal(tmp_path)


class Payload:
    """An object that an unpickler of plain tensors must refuse."""

    def __reduce__(self):
        return print, ("executed",)


def test_pickle_with_code_is_refused_and_not_run(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save({"fc.weight": Payload()}, tmp_path / "pytorch_model.bin")
    message = refusal(tmp_path)
    assert "is refused" in message and "convert it to model.safetensors" in message
    assert "executed" not in capsys.readouterr().out


def test_broken_pickle(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save(eagle_state(), tmp_path / "pytorch_model.bin")
    content = (tmp_path / "pytorch_model.bin").read_bytes()
    (tmp_path / "pytorch_model.bin").write_bytes(content[: len(content) // 2])
    assert "is truncated or not a torch file" in refusal(tmp_path)


def test_pickle_that_is_not_a_state_dict(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save([torch.zeros(2)], tmp_path / "pytorch_model.bin")
    assert "does not hold a plain dictionary of tensors" in refusal(tmp_path)


def test_validation_reads_headers_only(tmp_path, monkeypatch):
    """Validation of a head without d2t reads no tensor, so its time does not depend on the size."""
    write(tmp_path)
    monkeypatch.setattr("vllm_specplug.proposers.eagle2.checkpoint.safe_open", None)
    assert validate_checkpoint(tmp_path, HIDDEN, VOCAB).kind == "eagle"


def test_sharded_files_are_joined(tmp_path):
    write(tmp_path)
    state = eagle_state()
    (tmp_path / "model.safetensors").unlink()
    names = sorted(state)
    save_file({name: state[name] for name in names[:4]}, tmp_path / "model-1-of-2.safetensors")
    assert "has 1 of 2 shards of its weights; download the others" in refusal(tmp_path)
    save_file({name: state[name] for name in names[4:]}, tmp_path / "model-2-of-2.safetensors")
    assert validate_checkpoint(tmp_path, HIDDEN, VOCAB).kind == "eagle"
    assert load_head(tmp_path)[1].keys() == state.keys()


def test_sharded_pickles_are_joined(tmp_path):
    state = eagle_state()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for number, names in enumerate((sorted(state)[:4], sorted(state)[4:]), start=1):
        torch.save({name: state[name] for name in names}, tmp_path / f"pytorch_model-0000{number}-of-00002.bin")
    assert validate_checkpoint(tmp_path, HIDDEN, VOCAB).kind == "eagle"
    assert load_head(tmp_path)[1].keys() == state.keys()
    (tmp_path / "pytorch_model-00001-of-00002.bin").unlink()
    assert "has 1 of 2 shards of its weights; download the others" in refusal(tmp_path)
