"""Intervals of speedups over the questions."""

import numpy as np
import pytest

from vllm_specplug.bench.intervals import speedup_interval


def batches(seconds, passes=1):
    each = [{"questions": [str(i)], "tokens": 10, "seconds": float(value)} for i, value in enumerate(seconds)]
    return each * passes


def test_equal_questions_have_no_width():
    assert speedup_interval(batches([1.0] * 9), batches([2.0] * 9)) == (2.0, 2.0)


def test_few_questions_have_none():
    assert speedup_interval(batches([1.0] * 4, passes=3), batches([2.0] * 4, passes=3)) is None


def test_width_is_that_of_the_mean_and_passes_do_not_narrow_it():
    seconds = np.random.default_rng(1).uniform(0.5, 1.5, size=400)
    low, high = speedup_interval(batches(seconds), batches([2.0] * 400))
    # Relative standard error of a mean of 400 uniform numbers: 1 / sqrt(12 * 400).
    assert low < 2 / seconds.mean() < high and abs((high - low) / 2.0 - 2 * 1.96 / np.sqrt(12 * 400)) < 0.01
    assert speedup_interval(batches(seconds, passes=3), batches([2.0] * 400, passes=3)) == pytest.approx((low, high))
