"""The checks of the stress command, without servers."""

from __future__ import annotations

import pytest

from benchmarks.end_to_end import stress

ANSWER = {"token_ids": [1, 2], "text": "ab", "ended": "stop", "logprobs": [-1.5]}
AT_REST = dict.fromkeys((*stress.AT_REST, stress.FAILED), 0.0)


@pytest.mark.parametrize(
    "change", [{"token_ids": [1, 3]}, {"text": "ac"}, {"ended": "length"}, {"logprobs": [-1.4]}, {"logprobs": []}]
)
def test_other_answers_differ(change):
    assert stress.same([ANSWER, ANSWER], [ANSWER, {**ANSWER, "logprobs": [-1.50001]}])
    assert not stress.same([ANSWER, ANSWER], [ANSWER, {**ANSWER, **change}])
    assert not stress.same([ANSWER], [ANSWER, ANSWER])


def test_remaining_work_is_reported():
    assert stress.left_behind(AT_REST) == []
    for name in AT_REST:
        assert stress.left_behind({**AT_REST, name: 0.1})


def test_growth_is_reported_unless_the_plain_server_grows_too():
    steady, growing = [100.0, 900.0, 900.0] * 30, [10.0 * i for i in range(90)]
    assert stress.grown({"trees": steady, "plain": steady}) == []
    assert stress.grown({"trees": growing, "plain": growing}) == []
    assert stress.grown({"trees": growing, "plain": steady})
