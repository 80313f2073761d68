"""What a request may say about its own speculation."""

import pytest

from vllm_specplug.config import ConfigError
from vllm_specplug.request_args import wants_speculation


@pytest.mark.parametrize(
    ("extra_args", "wants"),
    [
        (None, True),
        ({}, True),
        ({"speculation": True}, True),
        ({"speculation": False}, False),
        ({"speculation": 0}, False),
    ],
)
def test_speculation(extra_args, wants):
    assert wants_speculation(extra_args) is wants


@pytest.mark.parametrize("value", ["false", 2, None, []])
def test_not_a_truth_value(value):
    with pytest.raises(ConfigError, match="speculation must be true or false"):
        wants_speculation({"speculation": value})
