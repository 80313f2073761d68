"""Which recorded graph of tree growth serves a batch, and how graphs are recorded; tests/v2 has them in an engine."""

import multiprocessing
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed
from vllm.distributed import parallel_state
from vllm.platforms import current_platform

from tests.doubles.cuda_graphs import Capture, Graph, kernel, use_graphs
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


def use_ranks(patch, ranks):
    use_graphs(patch)
    patch.setattr(torch.cuda, "Stream", lambda device=None: None)
    for name in ("_TP", "_PP", "_DP"):
        patch.setattr(parallel_state, name, ranks)
    return ranks


@pytest.fixture
def ranks(monkeypatch):
    return use_ranks(monkeypatch, Ranks())


def grow_with(ranks, num_reqs, slots, values):
    assert len(slots) == len(values) == num_reqs
    sums = ranks.all_reduce(values.sum(dim=1, keepdim=True))
    return slots.unsqueeze(1).expand(-1, 3), sums.expand(-1, 3)


@pytest.fixture
def calls():
    return []


@pytest.fixture
def growth(calls, ranks):
    """Its trees hold the slots and twice the sums of the second input, which ranks exchange."""

    def grow(num_reqs, *inputs):
        calls.append(num_reqs)
        return grow_with(ranks, num_reqs, *inputs)

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
    """And after the first call they are brought to the front, where the graph reads them."""
    growth.at_once = 2
    _, own = record(growth, calls)
    own.copy_(torch.rand(12, 5))
    expected = 2 * own.sum(dim=1)
    with torch.inference_mode():
        _, parents = growth(5, torch.arange(5), own)
    assert torch.allclose(parents[:, 0], expected[:5])


# ---- two ranks, in processes of their own


class TwoRanks(Ranks):
    """They add up their values.  While a graph is captured a rank only notes its buffers; the ranks exchange these at
    the end of vLLM's context, and a buffer that was not exchanged cannot be read by the other rank."""

    def __init__(self):
        self.noted, self.exchanged = [], set()

    @contextmanager
    def graph_capture(self, context):
        with super().graph_capture(context):
            yield context
        counts = [None, None]
        torch.distributed.all_gather_object(counts, len(self.noted))
        assert counts[0] == counts[1]
        self.exchanged.update(self.noted)

    def all_reduce(self, values):
        super().all_reduce(values)
        total = torch.empty_like(values)
        if Capture.active is not None:
            self.noted.append(total.data_ptr())
        self.add(values, total, Capture.active is not None)
        return total

    @kernel
    def add(self, values, total, captured):
        assert not captured or total.data_ptr() in self.exchanged
        total.copy_(values)
        torch.distributed.all_reduce(total)


def draft_in_two_ranks(rank, store, answers):
    with pytest.MonkeyPatch.context() as patch:
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        ranks, Graph.replays = use_ranks(patch, TwoRanks()), 0
        growth = Growth(partial(grow_with, ranks), 4)
        own = torch.full((4,), 9), torch.zeros(4, 5)
        with torch.inference_mode():
            growth.record(*own)
            found = []
            for num_reqs in (3, 4, 1):
                values = torch.arange(num_reqs * 5.0).view(num_reqs, 5) * (1 + 10 * rank)
                found.append(growth(num_reqs, torch.arange(num_reqs), values)[1][:, 0].tolist())
        answers.put((rank, found, Graph.replays))


def test_two_ranks_add_up_in_replayed_graphs(tmp_path):
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [context.Process(target=draft_in_two_ranks, args=(rank, tmp_path / "store", answers)) for rank in (0, 1)]
    for one in ranks:
        one.start()
    found = sorted(answers.get(timeout=60) for _ in ranks)
    expected = [[12.0 * sum(range(5 * i, 5 * i + 5)) for i in range(num_reqs)] for num_reqs in (3, 4, 1)]
    assert found == [(0, expected, 3), (1, expected, 3)]
    for one in ranks:
        one.join(30)
