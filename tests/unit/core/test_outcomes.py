"""Outcomes of drafted nodes against a search over token paths."""

import random

import numpy as np
import pytest

from vllm_specplug.core.outcomes import find_outcomes
from vllm_specplug.types import PADDING


@pytest.mark.parametrize("seed", range(20))
def test_outcomes_equal_those_of_the_paths(seed):
    rng = random.Random(seed)
    num_drafted, width, tokens_of = 4, 9, lambda count: [rng.randrange(2) for _ in range(count)]
    node_ids, parents = (np.full((num_drafted, width), PADDING, dtype=np.int64) for _ in range(2))
    depths, paths = np.zeros((num_drafted, width), dtype=np.int64), {}
    for row in range(num_drafted):
        for column in range(width):
            if rng.random() < 0.3:  # no node
                continue
            parent = rng.choice([PADDING, *(above for above in range(column) if depths[row, above])])
            above = paths.get((row, parent), ())
            node_ids[row, column], parents[row, column] = rng.randrange(2), parent
            depths[row, column], paths[row, column] = len(above) + 1, (*above, int(node_ids[row, column]))
    starts, new = [rng.randint(1, 5) for _ in range(3)], [tokens_of(rng.randint(0, 4)) for _ in range(3)]
    ends = [start + len(tokens) for start, tokens in zip(starts, new, strict=True)]
    ends[0] -= rng.choice([0, 6])  # another request with the same id and fewer tokens
    token_ids = np.array([tokens_of(12) for _ in range(5)], dtype=np.int32)
    rows, token_rows = rng.sample(range(num_drafted), 3), rng.sample(range(5), 3)
    for start, tokens, row in zip(starts, new, token_rows, strict=True):
        token_ids[row, start : start + len(tokens)] = tokens
    expected = [
        (100 * row + column, owner, path[-1] == new[owner][len(path) - 1])
        for owner, row in enumerate(rows)
        for column in range(width)
        if (path := paths.get((row, column))) and len(path) <= ends[owner] - starts[owner]
        if list(path[:-1]) == new[owner][: len(path) - 1]
    ]
    rows = np.array(rows)
    arrays = (token_ids, np.array(token_rows), np.array(starts), np.array(ends))
    found = find_outcomes((node_ids, parents, depths), rows, 100 * rows, *arrays)
    assert list(zip(*(values.tolist() for values in found), strict=True)) == expected
