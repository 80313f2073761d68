"""Which recorded graph of tree growth serves a batch, and how graphs are recorded; tests/v2 has them in an engine."""

from contextlib import contextmanager

import pytest
import torch
from vllm.distributed import parallel_state
from vllm.platforms import current_platform

from tests.doubles.cuda_graphs import Capture, Graph, use_graphs
from vllm_specplug.gpu.graph_sizes import request_counts
from vllm_specplug.gpu.growth import Growth


class Ranks:
    """A group of ranks.  As vLLM's custom all-reduce does, it needs vLLM's context while a graph is captured, and
    computes nothing in this context otherwise."""

    in_context = False

    @contextmanager
    def graph_capture(self, context):
        self.in_context = True
        yield context
        self.in_context = False

    def all_reduce(self, values):
        assert self.in_context == (Capture.active is not None)
        return 2 * values


@pytest.fixture
def ranks(monkeypatch):
    use_graphs(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: None)
    found = Ranks()
    for name in ("_TP", "_PP", "_DP"):
        monkeypatch.setattr(parallel_state, name, found)
    return found


@pytest.fixture
def calls():
    return []


@pytest.fixture
def growth(calls, ranks):
    """Its trees hold the slots and twice the sums of the second input, which ranks exchange."""

    def grow(num_reqs, slots, values):
        calls.append(num_reqs)
        assert len(slots) == len(values) == num_reqs
        sums = ranks.all_reduce(values.sum(dim=1, keepdim=True))
        return slots.unsqueeze(1).expand(-1, 3), sums.expand(-1, 3)

    return Growth(grow, 12)


@pytest.fixture
def replayed(monkeypatch):
    """The sizes of the replayed graphs."""
    found, honest = [], Graph.replay
    monkeypatch.setattr(Graph, "replay", lambda self: found.append(self) or honest(self))
    return found


def record(growth, calls, width=5):
    """Record graphs on inputs of their own, and return these; the calls so far are forgotten."""
    own = torch.full((12,), 9), torch.zeros(12, width)
    with torch.inference_mode():
        growth.record(*own)
    sizes = request_counts(growth.at_once)
    assert calls == [*reversed(sizes)] * 2  # before the capture and in it
    calls.clear()
    return own


def sizes(growth, replayed):
    return [size for graph in replayed for size, (one, _) in growth._recorded.items() if one is graph]


def drafted(growth, num_reqs, width=4):
    slots, values = torch.arange(num_reqs) + 3, torch.rand(num_reqs, width)
    with torch.inference_mode():
        token_ids, parents = growth(num_reqs, slots, values)
    assert torch.equal(token_ids, slots.unsqueeze(1).expand(-1, 3))
    assert torch.allclose(parents, 2 * values.sum(dim=1, keepdim=True).expand(-1, 3))


def test_the_smallest_graph_that_fits_is_replayed(growth, calls, replayed):
    drafted(growth, 2)
    assert calls == [2]
    calls.clear()
    own, _ = record(growth, calls)
    for num_reqs in (10, 9):
        drafted(growth, num_reqs)
    assert own[8:10].tolist() == [11, -1]  # the unused request has no slot, and not that of an earlier batch
    drafted(growth, 3)
    drafted(growth, 1, width=6)  # no graph is wide enough
    assert sizes(growth, replayed) == [10, 10, 3] and calls == [1]


def test_graphs_share_the_memory_of_vllms(growth, calls):
    record(growth, calls)
    assert {graph.pool for graph, _ in growth._recorded.values()} == {current_platform.get_global_graph_pool()}


@pytest.mark.parametrize("recorded", [False, True])
def test_no_call_has_more_requests_than_allowed(growth, calls, replayed, recorded):
    """A drafter compiled for so many rows cannot run more; neither its graphs."""
    growth.at_once = 2
    if recorded:
        record(growth, calls)
    drafted(growth, 5)
    assert (sizes(growth, replayed) if recorded else calls) == [2, 2, 1]


def test_inputs_in_place_are_not_copied(growth, calls):
    """And behind the first call they are brought to the front, where the graph reads them."""
    growth.at_once = 2
    _, own = record(growth, calls)
    own.copy_(torch.rand(12, 5))
    expected = 2 * own.sum(dim=1)
    with torch.inference_mode():
        _, parents = growth(5, torch.arange(5), own)
    assert torch.allclose(parents[:, 0], expected[:5])
