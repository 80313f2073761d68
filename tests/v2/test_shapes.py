"""Rounds of smaller shapes, without an engine: the trees are those of a smaller configuration, padded."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.doubles.device_work import DeviceWork
from tests.v2.conftest import NoLookAtTheDevice
from vllm_specplug.config import parse_options
from vllm_specplug.core.pruning import best_nodes
from vllm_specplug.gpu.drafters import base as base_v2
from vllm_specplug.gpu.drafters.model_free import ModelFreeSpeculator
from vllm_specplug.proposer import DeviceDraftContext
from vllm_specplug.proposers.lookup.device_proposer import LookupOnDevice

OPTIONS = parse_options({"method": "lookup", "num_speculative_tokens": 15, "draft_depth": 5, "budget": "measured"})
NUM_REQS, MAX_LEN = 3, 64


@pytest.fixture(scope="module")
def known():
    """Texts over few tokens, so that each has many matches."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 4, (4, MAX_LEN), generator=generator, dtype=torch.int32)
    lens = torch.tensor([50, 40, 60, 1], dtype=torch.int32)
    return SimpleNamespace(all_token_ids=SimpleNamespace(gpu=tokens), total_len=SimpleNamespace(gpu=lens))


@pytest.fixture(scope="module")
def speculator(known):
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64),
        speculative_config=SimpleNamespace(specplug=OPTIONS, num_speculative_tokens=15, metrics_file=None),
        model_config=SimpleNamespace(get_vocab_size=lambda: 32),
        parallel_config=SimpleNamespace(data_parallel_index=0),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base_v2, "leads", lambda: True)
        made = ModelFreeSpeculator(config, torch.device("cpu"), known)
    made.slot_params = SimpleNamespace(
        speculates=np.ones(4, dtype=bool),
        samples=np.zeros(4, dtype=bool),
        rejects=False,
        namespaces=torch.zeros(4, dtype=torch.int64),
    )
    return made


@pytest.fixture(scope="module")
def batch():
    mapping = torch.tensor([2, 0, 1])
    return SimpleNamespace(
        req_ids=["a", "b", "c"], num_reqs=NUM_REQS, idx_mapping=mapping, idx_mapping_np=mapping.numpy()
    )


def tokens_of(known):
    return known.all_token_ids.gpu, known.total_len.gpu, torch.zeros(4, dtype=torch.int64)


def propose(speculator, known, batch, nodes):
    """Draft for a batch; the last sampled tokens are those at the ends of the texts."""
    ends = known.total_len.gpu.long() - 1
    last = known.all_token_ids.gpu.gather(1, ends.unsqueeze(1)).long()
    with NoLookAtTheDevice():
        return speculator.propose(
            batch, None, None, None, None, None, None, last, None, num_speculative_tokens=nodes
        ), last[batch.idx_mapping].view(-1)


@pytest.mark.parametrize("nodes", [1, 3, 7, 15])
def test_a_round_drafts_the_best_nodes(speculator, known, batch, nodes):
    assert speculator.depths == {1: 1, 3: 3, 7: 5, 15: 5}
    speculator.trees.parents.fill_(-7)
    token_ids, roots = propose(speculator, known, batch, nodes)
    context = DeviceDraftContext(roots, batch.idx_mapping, *tokens_of(known), None)
    smaller = LookupOnDevice(replace(OPTIONS, num_speculative_tokens=nodes)).propose(context).tree
    assert token_ids.shape == (NUM_REQS, 15)
    stored = speculator.trees.parents[batch.idx_mapping]
    assert torch.equal(stored[:, : nodes + 1], smaller.parents)
    assert (smaller.parents[:, 1:] >= 0).all()  # else fewer nodes than asked for would be compared
    assert torch.equal(token_ids[:, :nodes], smaller.token_ids[:, 1:])
    assert (stored[:, nodes + 1 :] == -1).all()
    depths = speculator.trees.depths[batch.idx_mapping]
    assert torch.equal(depths[:, : nodes + 1], smaller.depths) and not depths[:, nodes + 1 :].any()


def test_a_plain_round_drafts_nothing(speculator, known, batch, monkeypatch):
    monkeypatch.setattr(speculator, "draft_trees", lambda *_, **__: pytest.fail("drafted"))
    token_ids, _ = propose(speculator, known, batch, 0)
    assert token_ids.shape == (NUM_REQS, 15)
    assert (speculator.trees.parents[batch.idx_mapping] == -1).all()


def test_without_a_number_the_configured_tree_is_drafted(speculator, known, batch):
    whole, _ = propose(speculator, known, batch, 15)
    again, _ = propose(speculator, known, batch, None)
    assert torch.equal(whole, again)


def test_the_kernel_that_keeps_answers_runs_at_start(speculator, known, batch):
    """Else it compiles when the first answer ends; here it keeps nothing."""
    propose(speculator, known, batch, 15)
    before = [values.clone() for values in (speculator._proposer._buffers.traffic, speculator._proposer._buffers.state)]
    with DeviceWork() as work:
        speculator.start_serving()
    assert work.launches["keep_answer_kernel"] == 1 and speculator.guard.failures == 0
    after = speculator._proposer._buffers.traffic, speculator._proposer._buffers.state
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_best_nodes_are_a_tree_of_the_largest_values(known):
    roots = torch.arange(NUM_REQS)
    slots = torch.tensor([0, 1, 2])
    context = DeviceDraftContext(roots, slots, *tokens_of(known), None)
    draft = LookupOnDevice(OPTIONS).propose(context)
    kept = best_nodes(draft, 6)
    assert torch.equal(kept.tree.token_ids[:, 0], roots) and kept.tree.token_ids.shape == (NUM_REQS, 7)
    largest = draft.log_values[:, 1:].sort(dim=1, descending=True).values[:, :6]
    assert torch.equal(kept.log_values[:, 1:].sort(dim=1, descending=True).values, largest)
    columns = torch.arange(7)
    assert (kept.tree.parents[:, 1:] < columns[1:]).all() and (kept.tree.parents[:, 1:] >= 0).all()
    assert torch.equal(kept.tree.depths[:, 1:], kept.tree.depths.gather(1, kept.tree.parents[:, 1:]) + 1)
