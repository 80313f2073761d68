"""The kernels of lookup and union draft the trees of their torch references."""

import pytest
import torch

from tests.doubles.contexts import make_match_inputs
from vllm_specplug.core.tree import from_flat
from vllm_specplug.proposer import DeviceDraftContext
from vllm_specplug.proposers.lookup.device import draft_matches, match_keys
from vllm_specplug.proposers.lookup.device_proposer import LookupOnDevice
from vllm_specplug.proposers.lookup.options import LookupOptions
from vllm_specplug.proposers.union import device_proposer
from vllm_specplug.proposers.union.device import merge_drafts
from vllm_specplug.proposers.union.learning import start_weights
from vllm_specplug.types import Draft, TokenTree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def context_of(token_ids, slots, lens, roots):
    return DeviceDraftContext(roots.to(DEVICE), slots.to(DEVICE), token_ids.to(DEVICE), lens.to(DEVICE), lambda: None)


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
        LookupOptions(num_speculative_tokens=15),
        LookupOptions(num_speculative_tokens=60, max_candidates=32, min_match=2, max_match=4),
        LookupOptions(num_speculative_tokens=4, draft_depth=1, max_candidates=1),
        LookupOptions(num_speculative_tokens=9, draft_depth=7, max_candidates=5, min_match=3),
    ],
)
def test_lookup(max_len, options):
    """Contexts from nothing to the last place, over several blocks of the kernel."""
    for seed in range(1 if max_len > 99 else 3):
        inputs = make_match_inputs([0, 1, 2, max_len // 2, max_len, max_len], max_len, seed=seed)
        assert (check_lookup(inputs, options, taught=seed / 4).tree.num_rows > 1).any()


def test_a_request_without_a_slot_drafts_nothing():
    inputs = make_match_inputs([30, 30], 40, seed=1)
    options = LookupOptions(num_speculative_tokens=9)
    assert (check_lookup(inputs, options).tree.num_rows > 1).all()
    inputs["slots"] = torch.tensor([0, -1])
    found = LookupOnDevice(options).propose(context_of(roots=torch.tensor([5, 6]), **inputs))
    assert found.tree.num_rows.tolist()[1] == 1 and found.tree.num_rows[0] > 1
    assert (match_keys(**inputs, min_match=1, max_match=4)[0] > 0).any()


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
