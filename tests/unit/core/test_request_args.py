"""What a request may say about its own speculation."""

import subprocess
import sys

import pytest

from vllm_specplug.config import ConfigError, TreeOptions
from vllm_specplug.core.request_args import check_request, wants_record, wants_speculation


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


@pytest.mark.parametrize("value", ["false", 2, 0.0, 1.0, None, []])
@pytest.mark.parametrize("name", ["speculation", "record"])
def test_not_a_truth_value(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be true or false"):
        check_request({name: value}, TreeOptions())


@pytest.mark.parametrize(
    ("extra_args", "wants"), [(None, True), ({"speculation": False}, True), ({"record": 0}, False)]
)
def test_record(extra_args, wants):
    assert wants_record(extra_args) is wants


@pytest.mark.parametrize(("name", "meant"), [("speculate", "speculation"), ("typical_epsilom", "typical_epsilon")])
def test_a_typo_is_refused(name, meant):
    with pytest.raises(ConfigError, match=f"unknown argument '{name}': did you mean '{meant}'"):
        check_request({name: 1}, TreeOptions())


def test_arguments_of_others_are_left_alone():
    check_request({"watermark_key": 7, "stream_id": "a", "speculation": True}, TreeOptions())


@pytest.mark.slow
def test_nothing_that_drafts_is_loaded():
    """The front end checks requests and never drafts: numba and LLVM would take some 80 MiB of it."""
    program = """
import sys
from vllm_specplug.config import TreeOptions
from vllm_specplug.core.request_args import check_request
check_request({"typical_delta": 0.3}, TreeOptions(verification="typical"))
print(sorted({"numba", "llvmlite", "vllm_specplug.core.tree"} & set(sys.modules)))
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert found.stdout.strip() == "[]", found
