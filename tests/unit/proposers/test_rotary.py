"""Rotary positions of a head: training computes what vLLM serves."""

import json

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.transformers_utils.config import get_config

from tests.doubles import tiny
from vllm_specplug.proposers.eagle2.rotary import numbers_of, rope_of, table

DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
BY_LAYER = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_parameters": {**YARN, "rope_theta": 1e6}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [1.0] * 8}},
        {"rope_parameters": BY_LAYER},
        {},
    ],
)
def test_as_vllm_computes_it(config, tmp_path):
    """Of the config that a head of such a target is saved with, as vLLM loads it."""
    folder = tiny.write_drafter(tmp_path / "head")
    file = folder / "config.json"
    saved = {key: value for key, value in json.loads(file.read_text()).items() if not key.startswith("rope")}
    file.write_text(json.dumps({**saved, "rope_parameters": rope_of(config)}))
    loaded = get_config(str(folder), trust_remote_code=False).rope_parameters
    with set_current_vllm_config(VllmConfig()):
        theirs = get_rope(16, max_position=256, rope_parameters=loaded, dtype=torch.float32)
    cos, sin = table(16, numbers_of(config), torch.arange(256))
    expected_cos, expected_sin = theirs.cos_sin_cache[:256].chunk(2, dim=-1)
    torch.testing.assert_close(cos[:, :8], expected_cos, atol=1e-5, rtol=0)
    torch.testing.assert_close(sin[:, 8:], expected_sin, atol=1e-5, rtol=0)


def test_a_scaling_changes_the_table():
    plain, scaled = (table(16, numbers_of(one), torch.arange(64)) for one in ({}, {"rope_scaling": LLAMA3}))
    assert not torch.allclose(plain[0], scaled[0], atol=0.1)


def test_sections_of_images_are_kept():
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    assert rope_of({"rope_parameters": rope}) == rope
    assert numbers_of({"rope_parameters": rope}) == tuple(DEFAULT.items())
