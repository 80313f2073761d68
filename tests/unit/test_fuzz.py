"""Whatever a configuration or a checkpoint holds: it is taken, or there is one clear error."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.doubles import tiny
from vllm_specplug.config import ConfigError, TreeOptions, parse_options
from vllm_specplug.proposers.eagle2.checkpoint import CheckpointError, validate_checkpoint
from vllm_specplug.proposers.medusa.checkpoint import validate_medusa

FUZZ = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
METHODS = ("dflash_tree", "draft_tree", "eagle2", "hass", "lookup", "medusa", "mtp_tree", "swift", "union")
KEYS = (
    "model", "num_speculative_tokens", "draft_depth", "draft_top_k", "min_node_value", "min_level_value",
    "verification", "typical_epsilon", "typical_delta", "trace_trees", "tree", "dynamic", "sources", "min_match",
    "tree_attention", "linear_rows", "on_failure", "max_match", "max_candidates", "traffic_tokens",
    "skip_ratio", "swift_state", "bayes_every", "streams", "coupled", "draft_dept", "", "__class__", "method ",
)  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=8,
)


@FUZZ
@given(
    st.sampled_from((*METHODS, "eagle9", "", None, 7, ["eagle2"])),
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=5),
)
def test_configurations(method, given_options):
    check_configuration({"method": method, **given_options})


@FUZZ
@given(st.sampled_from(METHODS), st.sampled_from(KEYS), VALUES)
def test_configurations_with_one_odd_value(method, key, value):
    model = {} if method in ("lookup", "mtp_tree", "swift", "union") else {"model": "smollm2-135m-instruct"}
    sources = {"sources": [{"method": "lookup"}]} if method == "union" else {}
    check_configuration({"method": method, **model, **sources, key: value})


def check_configuration(config):
    try:
        options = parse_options(config)
    except ConfigError as error:
        assert len(str(error)) > 20
    else:
        assert isinstance(options, TreeOptions) and 1 <= options.num_speculative_tokens <= 255


# ---- checkpoints

TENSORS = ("fc.weight", "../../x", "layers.0.mlp.up_proj.weight", "d2t", "__metadata__",
           "layers.0.hidden_norm.weight", "layers.1.mlp.up_proj.weight", "midlayer.self_attn.q_proj.weight",
           "9999.0.linear.weight", "1.0.linear.weight", "0.0.linear.weight")  # fmt: skip


@pytest.fixture(scope="module")
def drafter(tmp_path_factory) -> Path:
    return tiny.write_drafter(tmp_path_factory.mktemp("fuzz") / "eagle")


def damaged(drafter: Path, name: str, content: bytes) -> Path:
    path = drafter.parent / "damaged"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(drafter, path)
    (path / name).write_bytes(content)
    return path


def check_checkpoint(path: Path) -> None:
    for validate in (validate_checkpoint, validate_medusa):
        try:
            validate(path, target_hidden_size=tiny.HIDDEN, target_vocab_size=tiny.VOCAB)
        except ValueError as error:  # CheckpointError, ConfigError
            assert len(str(error)) > 20


@FUZZ
@given(st.data())
def test_truncated_and_flipped_files(drafter, data):
    name = data.draw(st.sampled_from(["model.safetensors", "config.json"]))
    content = bytearray((drafter / name).read_bytes())
    header = min(len(content), 3000)
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, header))]
    else:
        for place in data.draw(st.lists(st.integers(0, header - 1), min_size=1, max_size=8)):
            content[place] = data.draw(st.integers(0, 255))
    check_checkpoint(damaged(drafter, name, bytes(content)))


@FUZZ
@given(
    st.dictionaries(
        st.text(max_size=12) | st.sampled_from(TENSORS), st.lists(st.integers(-2, 1 << 70), max_size=4), max_size=6
    )
)
def test_hostile_names_and_shapes(drafter, shapes):
    header = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]} for name, shape in shapes.items()}
    text = json.dumps(header).encode()
    check_checkpoint(damaged(drafter, "model.safetensors", struct.pack("<Q", len(text)) + text + b"\0" * 4))


@pytest.mark.parametrize("change", [{"num_attention_heads": 0}, {"head_dim": "x"}, {"num_key_value_heads": {}}])
def test_config_fields_of_another_kind(drafter, change):
    config = json.loads((drafter / "config.json").read_text()) | change
    path = damaged(drafter, "config.json", json.dumps(config).encode())
    with pytest.raises(CheckpointError, match=f"lacks {next(iter(change))}"):
        validate_checkpoint(path, target_hidden_size=tiny.HIDDEN, target_vocab_size=tiny.VOCAB)
