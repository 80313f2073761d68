"""Greedy decoding straight from the logits, against torch."""

import pytest
import torch

from tests.doubles import oracle
from tests.doubles.oracle_tensors import to_tree
from vllm_specplug.core.walk import walk_exact
from vllm_specplug.cpu.kernels import cpu_ops
from vllm_specplug.cpu.kernels.tree_ops import greedy_tokens, greedy_walk, walks_greedily

NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _ops():
    if cpu_ops.operators() is None:
        pytest.skip("the C++ ops cannot be built here")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 17, 2048, 2049, 49152])
def test_tokens_are_those_of_argmax(dtype, size):
    logits = torch.randn(7, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[1] = 1.0
    logits[2, size // 2 :] = 9.0  # often the largest, in several blocks
    tokens = greedy_tokens(logits)
    assert tokens.dtype == torch.int32 and tokens.shape == (7, 1)
    assert tokens.flatten().tolist() == logits.float().argmax(dim=1).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "row",
    [[-1, -0.0, 0.0, -2], [0.0, -0.0], [1, NAN, 2, NAN], [INF, -NAN], [-NAN, INF], [-INF, -INF], [0, INF, INF]],
)
def test_zeros_infinities_and_nan(dtype, row):
    logits = torch.tensor([row]).to(dtype)
    assert greedy_tokens(logits).item() == logits.float().argmax(dim=1).item()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_vocabulary_cut_out_of_a_padded_one(dtype):
    padded = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    padded[:, 32:] = 99.0
    for logits in (padded[:, :32], padded[1::2, :32], padded[:, :32].T[:5]):
        assert greedy_tokens(logits).flatten().tolist() == logits.float().argmax(dim=1).tolist()


@pytest.mark.parametrize("max_emitted", [None, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_walks_equal_the_reference(dtype, max_emitted):
    rng, vocab_size, deepest = oracle.seeded(7), 4, 0
    for _ in range(200):
        trees = [oracle.random_tree(rng, 12, vocab_size) for _ in range(rng.randint(1, 5))]
        tree = to_tree(trees)
        num_reqs, width = tree.token_ids.shape
        logits = torch.randn(num_reqs * width, vocab_size).to(dtype)
        first_rows = torch.arange(num_reqs) * width
        active = torch.rand(num_reqs) < 0.8
        limit = max_emitted or width
        found = greedy_walk(tree, logits, first_rows, active, limit)

        def sample(rows, _active, _depth, logits=logits, first_rows=first_rows):
            return logits[first_rows + rows].float().argmax(dim=1)

        expected = walk_exact(tree, sample, active, max_emitted=limit)
        assert torch.equal(found.num_emitted, expected.num_emitted)
        longest = max(int(expected.num_emitted.max()), 1)
        deepest = max(deepest, longest)
        for name in ("output_token_ids", "path_rows"):
            wide = getattr(expected, name)
            assert torch.equal(getattr(found, name), wide[:, :longest]) and (wide[:, longest:] == -1).all()
            assert getattr(found, name).dtype == wide.dtype
    assert deepest == (max_emitted or deepest) and (max_emitted or deepest > 3)


def test_a_root_without_logits_is_an_error():
    tree = to_tree([oracle.random_tree(oracle.seeded(0), 3, 4)])
    with pytest.raises(IndexError, match="no logits for row 5"):
        greedy_walk(tree, torch.zeros(5, 4), torch.tensor([5]), torch.tensor([True]), 3)
    walk = greedy_walk(tree, torch.zeros(5, 4), torch.tensor([5]), torch.tensor([False]), 3)
    assert walk.num_emitted.tolist() == [0] and walk.output_token_ids.tolist() == [[-1]]


def test_other_dtypes_are_left_to_the_host():
    assert walks_greedily(torch.zeros(1, 2)) and not walks_greedily(torch.zeros(1, 2, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="float32, bfloat16 or float16"):
        greedy_tokens(torch.zeros(1, 2, dtype=torch.float64))
