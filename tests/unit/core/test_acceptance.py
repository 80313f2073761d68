"""A new version of a drafter that accepts less is found out, one that is as good seldom is."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_specplug.core.acceptance import BLOCK_TREES, KEPT_BLOCKS, LEAST_BLOCKS, LOOKS, Acceptance, Block, Comparison


def serve(acceptance, rng, mean, requests, is_worse=lambda: False):
    """Answer requests of some 40 trees, whose texts differ; stop if ``is_worse``."""
    for number in range(requests):
        chance = np.clip(rng.normal(mean, 0.08), 0.02, 0.98)
        for _ in range(rng.integers(20, 60)):
            acceptance.add(f"r{number}", int(rng.binomial(6, chance)))
            if is_worse():
                return True
        acceptance.finish([f"r{number}"])
    return False


def compare(seed, before, after):
    rng = np.random.default_rng(seed)
    old = Acceptance()
    serve(old, rng, before, 60)
    comparison = Comparison(old.blocks)
    worse = serve(comparison.after, rng, after, 60, comparison.is_worse)
    return worse, comparison


def test_blocks_are_of_one_request_and_complete():
    acceptance = Acceptance()
    for tree in range(BLOCK_TREES + 3):
        acceptance.add("long", 2)
        if tree < 5:
            acceptance.add("short", 1)
    assert list(acceptance.blocks) == [Block(2 * BLOCK_TREES, BLOCK_TREES)]
    acceptance.finish(["short", "unknown"])
    assert acceptance.blocks[-1] == Block(5, 5) and acceptance.num_blocks == 2
    for _ in range(BLOCK_TREES * (KEPT_BLOCKS + 5)):
        acceptance.add("long", 0)
    assert len(acceptance.blocks) == KEPT_BLOCKS


def test_a_worse_version_is_found_out():
    found = [compare(seed, 0.5, 0.35)[0] for seed in range(20)]
    assert sum(found) >= 19
    assert compare(0, 0.5, 0.35)[1].means() == pytest.approx((3.0, 2.1), abs=0.4)


@pytest.mark.parametrize("after", [0.5, 0.55])
def test_a_version_that_is_not_worse_stays(after):
    found = [compare(seed, 0.5, after) for seed in range(60)]
    assert sum(worse for worse, _ in found) <= 6
    assert all(comparison.has_ended for worse, comparison in found if not worse)


def test_too_few_blocks_before_decide_nothing():
    comparison = Comparison([Block(100, 32)] * (LEAST_BLOCKS - 1))
    for number in range(LOOKS[-1]):
        comparison.after.add(str(number), 0)
        comparison.after.finish([str(number)])
    assert not comparison.is_worse() and comparison.has_ended
