"""The kernels of lookup and union draft the trees of their torch references."""

import random

import numpy as np
import pytest
import torch

from tests.doubles.constants import with_constants
from tests.doubles.contexts import context, make_match_inputs
from tests.doubles.lookup_reference import draft_matches, match_keys
from tests.doubles.oracle_tensors import to_rows
from tests.doubles.union_reference import merge_drafts
from vllm_specplug.core.tree import from_flat
from vllm_specplug.proposer import DeviceDraftContext, EndedRequest
from vllm_specplug.proposers.lookup.device_proposer import LookupOnDevice
from vllm_specplug.proposers.lookup.drafting import LookupProposer
from vllm_specplug.proposers.lookup.options import LookupOptions
from vllm_specplug.proposers.union import device_proposer
from vllm_specplug.proposers.union.learning import start_weights
from vllm_specplug.types import Draft, TokenTree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def context_of(token_ids, slots, lens, roots, namespaces=None):
    namespaces = torch.zeros(len(token_ids), dtype=torch.int64) if namespaces is None else namespaces
    tensors = (values.to(DEVICE) for values in (roots, slots, token_ids, lens, namespaces))
    return DeviceDraftContext(*tensors, lambda: None)


def check_lookup(inputs, options, taught=0.0):
    """Equal trees, also after learning has changed all weights; returns the draft of the reference."""
    roots, lookup = torch.arange(len(inputs["slots"])) + 3, LookupOnDevice(options)
    lookup.learner.calibration.weights += taught
    weights = lookup.learner.calibration.weights
    expected = draft_matches(**inputs, root_token_ids=roots, options=options, weights=weights)
    found = lookup.propose(context_of(roots=roots, **inputs))
    for name in ("token_ids", "parents", "depths", "num_rows"):
        assert torch.equal(getattr(found.tree, name).cpu(), getattr(expected.tree, name)), name
    assert torch.allclose(found.log_values.cpu(), expected.log_values, rtol=1e-6, atol=0)
    return expected


@pytest.mark.parametrize("max_len", [40, 2100])
@pytest.mark.parametrize(
    "options",
    [
        LookupOptions(traffic_tokens=0, num_speculative_tokens=15),
        with_constants(
            LookupOptions(traffic_tokens=0, num_speculative_tokens=60), max_candidates=32, min_match=2, max_match=4
        ),
        with_constants(LookupOptions(traffic_tokens=0, num_speculative_tokens=4, draft_depth=1), max_candidates=1),
        with_constants(
            LookupOptions(traffic_tokens=0, num_speculative_tokens=9, draft_depth=7), max_candidates=5, min_match=3
        ),
    ],
)
def test_lookup(max_len, options):
    """Contexts from nothing to the last place, over several blocks of the kernel."""
    for seed in range(1 if max_len > 99 else 3):
        inputs = make_match_inputs([0, 1, 2, max_len // 2, max_len, max_len], max_len, seed=seed)
        assert (check_lookup(inputs, options, taught=seed / 4).tree.num_rows > 1).any()


def test_a_request_without_a_slot_drafts_nothing():
    inputs = make_match_inputs([30, 30], 40, seed=1)
    options = LookupOptions(traffic_tokens=0, num_speculative_tokens=9)
    assert (check_lookup(inputs, options).tree.num_rows > 1).all()
    inputs["slots"] = torch.tensor([0, -1])
    found = LookupOnDevice(options).propose(context_of(roots=torch.tensor([5, 6]), **inputs))
    assert found.tree.num_rows.tolist()[1] == 1 and found.tree.num_rows[0] > 1
    assert (match_keys(**inputs, min_match=1, max_match=4)[0] > 0).any()


#: Of requests with the same salt, and without one.
NAMESPACES = (0, -(2**62) - 5)


class Traffic:
    """Lookup of both runners over the same ended requests; ``min_match`` 3: V1's hash buckets add shorter ones."""

    def __init__(self, seed, most):
        self.random, self.vocab = random.Random(seed), 12 if most > 10 else 6
        self.last, self.namespace = self.tokens(12), 0  # of the request that ended last
        options = LookupOptions(traffic_tokens=1024, draft_depth=5, num_speculative_tokens=14, min_node_value=0.0)
        with_constants(options, max_candidates=32, min_match=3, max_match=5)
        self.v1, self.v2 = LookupProposer(options), LookupOnDevice(options)
        self.v1._learn = lambda *_: None
        for weights in (self.v1.calibration.weights, self.v2.learner.calibration.weights):
            weights += np.random.default_rng(seed).normal(size=weights.shape) / 5
        self.draft([[1]] * 3)  # makes the buffers, for 3 requests
        for number in range(most):
            self.end(self.tokens(self.random.randint(2, 190)), f"ended {number}")

    def tokens(self, count):
        return [self.random.randrange(self.vocab) for _ in range(count)]

    def end(self, tokens, name):
        self.last, prompt_len = tokens, self.random.randint(1, len(tokens) - 1)
        namespace = self.namespace = self.random.choice(NAMESPACES)
        given = {"prompt_lens": [prompt_len], "namespaces": [namespace]}
        for known in (tokens[: prompt_len + 1], tokens):  # behind the prompt, and at the end
            self.v1.propose(context([known], ids=[name], max_len=200, **given))
        self.v1.finish([name])
        after_stop, namespaces = [*tokens, 5, 6], torch.tensor([7, namespace, 7], device=DEVICE)
        self.v2.finish(EndedRequest(*on_device([[], after_stop, []]), namespaces, 1, prompt_len, len(tokens)))
        buffers, ring = self.v2._buffers, self.v1._traffic
        assert buffers.traffic.tolist() == ring.tokens.tolist()
        assert buffers.owners.tolist() == ring.namespaces.tolist()
        assert int(buffers.state[0]) == ring.cursor

    def draft(self, texts):
        """The drafts of both."""
        names = [f"{self.random.random()}" for _ in texts]
        namespaces = [self.random.choice((*NAMESPACES, self.namespace)) for _ in texts]
        on_v1 = self.v1.propose(context(texts, ids=names, max_len=200, namespaces=namespaces))
        token_ids, lens = on_device(texts)
        roots = torch.tensor([text[-1] for text in texts])
        slots = torch.arange(len(texts))
        found = self.v2.propose(context_of(token_ids, slots, lens, roots, torch.tensor(namespaces)))
        return on_v1, found


def on_device(texts):
    """Tokens and lengths of requests."""
    token_ids = torch.full((len(texts), 200), 7, dtype=torch.int32)
    for row, text in zip(token_ids, texts, strict=True):
        row[: len(text)] = torch.tensor(text, dtype=torch.int32)
    return token_ids.to(DEVICE), torch.tensor([len(text) for text in texts], dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(("seed", "most"), [(1, 0), (2, 4), (3, 8), (4, 60), (5, 60)])
def test_traffic(seed, most):
    """The ring holds what V1's holds, also when it starts again, and trees are V1's; those of short requests too."""
    both, sizes, shares = Traffic(seed, most), [], []
    for _ in range(4):
        # Any text, one that an answer goes on from for two tokens, and one that an answer ends with.
        texts = [both.tokens(both.random.choice([1, 2, 12, 30])), both.last[-9:-2], both.last[-7:]]
        expected, found = both.draft(texts)
        lengths, _, is_own = both.v2._buffers.matches[:3].unbind(dim=1)
        for request in range(3):
            if (lengths[request] > 0).all():
                continue  # of more matches than candidates V1 keeps the newest, V2 the longest
            rows = to_rows(found.tree, request)
            assert rows == to_rows(expected.tree, request)
            values = (draft.log_values[request, : len(rows)].tolist() for draft in (found, expected))
            assert next(values) == pytest.approx(next(values), rel=1e-5)
            sizes.append(int(found.tree.num_rows[request]))
            shares.append(bool(((lengths[request] > 0) & (is_own[request] == 0)).any()))
    assert any(shares) == (most > 0) and (max(sizes) > 2 or most == 0)


def random_draft(num_reqs, num_nodes, seed, vocab=3):
    """Trees of few different tokens, so that drafts agree in parts, some of them short; equal siblings may occur."""
    generator = torch.Generator().manual_seed(seed)
    parents, token_ids = torch.full((num_reqs, num_nodes + 1), -1), torch.full((num_reqs, num_nodes + 1), -1)
    num_rows = torch.randint(1, num_nodes + 2, (num_reqs,), generator=generator)
    num_rows[0] = num_nodes + 1
    values = torch.full(parents.shape, float("-inf"))
    for request, rows in enumerate(num_rows.tolist()):
        values[request, 0], token_ids[request, 0] = 0.0, 90 + request
        for row in range(1, rows):
            parents[request, row] = parent = int(torch.randint(max(0, row - 6), row, (1,), generator=generator))
            token_ids[request, row] = int(torch.randint(0, vocab, (1,), generator=generator))
            step = torch.rand(1, generator=generator).item() * (row % 7 > 0)  # some edges are certain
            values[request, row] = values[request, parent] - step
    return Draft(from_flat(token_ids, parents, num_rows), values)


@pytest.mark.parametrize("widths", [(9, 12), (60, 60), (5,), (3, 8, 20)])
def test_union(widths):
    for seed in range(2):
        drafts = [random_draft(3, width, 10 * seed + source) for source, width in enumerate(widths)]
        weights = start_weights(len(widths)) + seed / 4
        expected = merge_drafts(drafts, 12, torch.from_numpy(weights))
        given = [
            Draft(TokenTree(*(values.to(DEVICE) for values in vars(draft.tree).values())), draft.log_values.to(DEVICE))
            for draft in drafts
        ]
        found = device_proposer.merge_drafts(given, 12, device_proposer.Merging.make(weights, given, 5))
        for name in ("token_ids", "parents", "depths", "num_rows"):
            assert torch.equal(getattr(found.tree, name).cpu(), getattr(expected.tree, name)), name
        assert torch.allclose(found.log_values.cpu(), expected.log_values, rtol=1e-6, atol=0)
