"""Nothing of a round on a device mixes in a tensor of the host or looks at a value: shown without a device.

Fake tensors have no values, and operations on fake tensors of two devices raise; "meta" stands for the second one.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.doubles import union_reference as union
from tests.doubles.lookup_reference import draft_matches
from vllm_specplug.core import tree
from vllm_specplug.core.draft_sampling import likeliest
from vllm_specplug.core.growth import TORCH, TORCH_STATIC
from vllm_specplug.core.kv import KvScratch
from vllm_specplug.core.step import plan_step
from vllm_specplug.gpu.trees import DeviceTrees
from vllm_specplug.proposers.eagle2.checkpoint import target_ids
from vllm_specplug.proposers.eagle2.drafting import DraftFeatures, grow_tree
from vllm_specplug.proposers.lookup.options import LookupOptions
from vllm_specplug.proposers.medusa import drafting as medusa
from vllm_specplug.types import Walk

DEVICE = torch.device("meta")


@pytest.fixture(autouse=True)
def fake():
    # Real tensors from before, fake ones from here.
    kept = (medusa._guesses_of, tree._static_shape, union._start_weights)
    for cached in kept:
        cached.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=True):  # torch.tensor makes real ones
        yield
    for cached in kept:
        cached.cache_clear()


def on_device(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype, device=DEVICE)


def test_control():
    with pytest.raises(RuntimeError, match="devices, cpu and meta"):
        torch.arange(3) + on_device(3)


@pytest.mark.parametrize("ops", [TORCH, TORCH_STATIC])
def test_growing_a_tree(ops):
    draft_ids = target_ids(on_device(50, dtype=torch.int64))
    head = on_device(50, 16)

    def score(_level, hidden, top_k):
        return likeliest(hidden @ head.T, top_k, draft_ids)

    def forward(level, token_ids, features, mask):
        assert mask.device == DEVICE
        cache, rows = on_device(60, 2, 8), on_device(9, dtype=torch.int64)
        KvScratch(cache, cache, rows).write(on_device(9, 2, 8), on_device(9, 2, 8))
        return DraftFeatures(features, features)

    root = DraftFeatures(on_device(3, 16), on_device(3, 16))
    options = {"num_nodes": 9, "draft_depth": 4, "draft_top_k": 3, "min_node_value": 0.05, "ops": ops}
    draft = grow_tree(on_device(3, dtype=torch.int64), root, score, forward, **options)
    assert draft.tree.token_ids.device == DEVICE


@pytest.mark.parametrize("ids", [True, False])
def test_medusa_trees(ids):
    roots, logits = on_device(3, dtype=torch.int64), on_device(3, 2, 50)
    draft_ids = target_ids(on_device(50, dtype=torch.int64)) if ids else None
    assert medusa.fill_tree(roots, logits, draft_ids, ((0,), (1,), (0, 1))).tree.parents.device == DEVICE
    draft = medusa.choose_tree(roots, logits, draft_ids, num_nodes=5, draft_top_k=3, min_node_value=0.0)
    assert draft.tree.parents.device == DEVICE


def test_lookup_and_unions():
    slots, roots = on_device(3, dtype=torch.int64), on_device(3, dtype=torch.int64)
    options = LookupOptions(num_speculative_tokens=9)
    token_ids, lens = on_device(8, 200, dtype=torch.int32), on_device(8, dtype=torch.int32)
    found = draft_matches(token_ids, slots, lens, roots, options)
    assert found.tree.parents.device == DEVICE
    assert union.merge_drafts([found, found], 9).tree.parents.device == DEVICE


def test_trees_of_the_v2_runner():
    trees = DeviceTrees(4, 8, 3, 64, DEVICE)
    trees.staged = True
    walk = Walk(on_device(2, 9, dtype=torch.int64), on_device(2, 9, dtype=torch.int64), on_device(2).int())
    trees.plan = plan_step(walk, trees.tree_start[:2], trees.max_num_tokens)
    hidden = trees.in_path_order(on_device(20, 16))
    assert hidden.shape == (20, 16) and trees.last_rows(None).device == DEVICE
    batch = SimpleNamespace(cu_num_logits=on_device(3, dtype=torch.int32), idx_mapping=on_device(2, dtype=torch.int32))
    assert trees.batch_tree(batch, on_device(20, dtype=torch.int64)).token_ids.device == DEVICE
