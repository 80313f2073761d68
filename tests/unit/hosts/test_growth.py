"""Which recorded graph of tree growth serves a batch; recording itself needs a GPU (tests/v2, test_cuda_graphs)."""

import pytest
import torch

from vllm_specplug.gpu.growth import Growth


@pytest.fixture
def calls():
    return []


@pytest.fixture
def growth(calls):
    """Its trees hold the slots and the sums of the second input."""

    def grow(num_reqs, slots, values):
        calls.append(num_reqs)
        assert len(slots) == len(values) == num_reqs
        return slots.unsqueeze(1).expand(-1, 3), values.sum(dim=1, keepdim=True).expand(-1, 3)

    return Growth(grow, 6)


def record(growth, own, sizes, replayed):
    """Put graphs in place that compute on their own inputs, as recorded ones do."""

    class Graph:
        def __init__(self, size):
            self.size, self.result = size, (torch.zeros(size, 3), torch.zeros(size, 3))

        def replay(self):
            slots, values = (given[: self.size] for given in own)
            replayed.append((self.size, slots.clone()))
            self.result[0].copy_(slots.unsqueeze(1).expand(-1, 3))
            self.result[1].copy_(values.sum(dim=1, keepdim=True).expand(-1, 3))

    growth._inputs, graphs = own, {size: Graph(size) for size in sizes}
    growth._recorded = {size: (graph, graph.result) for size, graph in graphs.items()}


def drafted(growth, num_reqs, width=4):
    slots, values = torch.arange(num_reqs) + 3, torch.rand(num_reqs, width)
    token_ids, parents = growth(num_reqs, slots, values)
    assert torch.equal(token_ids, slots.unsqueeze(1).expand(-1, 3))
    assert torch.allclose(parents, values.sum(dim=1, keepdim=True).expand(-1, 3))


def test_the_smallest_graph_that_fits_is_replayed(growth, calls):
    drafted(growth, 2)
    assert calls == [2]
    replayed, own = [], (torch.full((6,), 9), torch.zeros(6, 5))
    record(growth, own, (1, 4), replayed)
    drafted(growth, 3)
    size, slots = replayed[0]
    assert size == 4 and slots.tolist() == [3, 4, 5, -1]  # the unused request has no slot
    drafted(growth, 5)  # no graph is large enough
    drafted(growth, 1, width=6)  # nor wide enough
    assert calls == [2, 5, 1] and len(replayed) == 1


@pytest.mark.parametrize("recorded", [False, True])
def test_no_call_has_more_requests_than_allowed(growth, calls, recorded):
    """A drafter compiled for so many rows cannot run more; neither its graphs."""
    growth.at_once, replayed, own = 2, [], (torch.full((6,), 9), torch.zeros(6, 4))
    if recorded:
        record(growth, own, (1, 2), replayed)
    drafted(growth, 5)
    assert ([size for size, _ in replayed] if recorded else calls) == [2, 2, 1]


def test_inputs_in_place_are_not_copied(growth):
    """And behind the first call they are brought to the front, where the graph reads them."""
    growth.at_once, replayed, own = 2, [], (torch.full((6,), 9), torch.zeros(6, 4))
    record(growth, own, (2,), replayed)
    own[1].copy_(torch.arange(24.0).view(6, 4))
    expected = own[1].sum(dim=1)
    _, parents = growth(5, torch.arange(5), own[1])
    assert torch.equal(parents[:, 0], expected[:5])
