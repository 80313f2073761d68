"""Errors of proposers are caught; not where other ranks may have drafts."""

import pytest

from vllm_specplug.core.guard import Guard


def fail():
    raise RuntimeError("out of luck")


def test_an_error_costs_the_draft():
    guard = Guard("x")
    assert guard.run(fail) is None and guard.failures == 1


def test_with_several_ranks_an_error_ends_the_process(caplog):
    """Of an ``Exception`` in another rank than the first vLLM hears nothing."""
    guard = Guard("x", raises=True)
    with pytest.raises(SystemExit) as raised:
        guard.run(fail)
    assert raised.value.code == 1
    assert guard.failures == 1 and "'x' failed; other ranks" in caplog.text and "out of luck" in caplog.text
    assert guard.run(lambda: 3) == 3
