"""Errors of proposers are caught; not where other ranks may have drafts."""

import pytest

from vllm_specplug.core.guard import Guard


def fail():
    raise RuntimeError("out of luck")


def test_an_error_costs_the_draft():
    guard = Guard("x")
    assert guard.run(fail) is None and guard.failures == 1


def test_with_several_ranks_an_error_is_raised_again(caplog):
    guard = Guard("x", raises=True)
    with pytest.raises(RuntimeError, match="out of luck"):
        guard.run(fail)
    assert guard.failures == 1 and "'x' failed; the server stops" in caplog.text
    assert guard.run(lambda: 3) == 3
