"""Steps with trees and other requests side by side: each row is attended to once, and metadata is made once a step."""

from types import SimpleNamespace

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode

from tests.doubles import interpreted
from tests.hosts.conftest import runner_of
from tests.v2.conftest import SCARCE, answers, same
from tests.v2.test_identity import TREE
from vllm_specplug.core.tree_rows import DeviceTreeRows
from vllm_specplug.gpu import attention as paged
from vllm_specplug.gpu import step as v2_step
from vllm_specplug.gpu.attention import TreeTritonMetadata, with_trees
from vllm_specplug.gpu.runner import TreeModelState


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def make_rows(num_trees, num_tree_rows):
    numbers = ints(*range(num_trees))
    return DeviceTreeRows(
        context_lens=numbers,
        query_start=numbers,
        query_lens=numbers,
        tree_start=numbers,
        tree_lens=numbers,
        all_rows=num_tree_rows is None,
        bits=numbers,
        max_query_len=4,
        max_context_len=9,
        uniform=True,
        num_tree_rows=num_tree_rows,
    )


def make_metadata(**changes):
    """Two trees of four rows, then requests of 5 and 1 rows."""
    names = ("seq_threshold_3D", "num_par_softmax_segments", "softmax_segm_output", "softmax_segm_max")
    given = {
        **dict.fromkeys((*names, "softmax_segm_expsum")),
        "num_actual_tokens": 14,
        "max_query_len": 5,
        "query_start_loc": ints(0, 4, 8, 13, 14),
        "max_seq_len": 40,
        "seq_lens": ints(11, 12, 13, 14),
        "block_table": ints(0, 1, 2, 3).unsqueeze(1),
        "slot_mapping": torch.arange(14),
        "causal": True,
    }
    return TreeTritonMetadata(**{**given, **changes})


def test_the_requests_behind_the_trees():
    found = with_trees(make_metadata(scheduler_metadata=ints(1)), make_rows(2, 8))
    others = found.others
    assert found.tree is not None and others.tree is None and found.query_start_loc.tolist() == [0, 4, 8, 13, 14]
    assert others.query_start_loc.tolist() == [0, 5, 6] and others.num_actual_tokens == 6
    assert others.seq_lens.tolist() == [13, 14] and others.block_table.flatten().tolist() == [2, 3]
    assert others.slot_mapping.tolist() == list(range(8, 14)) and others.scheduler_metadata is None
    assert with_trees(make_metadata(), make_rows(2, None)).others is None
    by_request = {"mm_prefix_range_tensor": ints(1)}, {"causal": ints(1, 1, 1, 1)}, {"rswa_prefix_lens": ints(1)}
    assert all(with_trees(make_metadata(**changes), make_rows(2, 8)).others is None for changes in by_request)


@pytest.fixture
def state(monkeypatch):
    """A model state whose layers ``a`` and ``b`` share metadata, as does the drafter's, and the list of its copies."""
    shared, copies = make_metadata(), []
    inner = SimpleNamespace(
        prepare_attn=lambda *_, **__: {"a": shared, "b": shared, "draft": shared, "c": make_metadata()}
    )
    speculator = SimpleNamespace(trees=None, draft_attn_layer_names={"draft"})
    found = TreeModelState(inner, SimpleNamespace(speculator=speculator))
    monkeypatch.setattr(found, "_stage", lambda *_: make_rows(2, 8))
    monkeypatch.setattr(v2_step, "with_trees", lambda *args: copies.append(args) or with_trees(*args))
    return found, copies


def test_metadata_is_copied_once_per_group_of_layers(state):
    state, copies = state
    found = state.prepare_attn(None, CUDAGraphMode.PIECEWISE)
    assert found["a"] is found["b"] is not found["c"] and found["a"].tree and found["draft"].tree is None
    assert len(copies) == 2


def test_a_replayed_graph_needs_no_metadata(state):
    state, copies = state
    assert state.prepare_attn(None, CUDAGraphMode.FULL)["a"].tree is None and not copies
    assert state.prepare_attn(None, CUDAGraphMode.FULL, for_capture=True)["a"].tree is not None


def attended(monkeypatch):
    """The list gets, for each layer with trees and other rows: rows of the trees, of all, and given to vLLM."""
    given, honest = [], interpreted._PagedReference.forward
    outer = paged.TreeImpl.forward

    def forward(self, layer, query, key, value, kv_cache, metadata, output, *args, **kwargs):
        tree = getattr(metadata, "tree", None)
        before = len(rows_of_vllm)
        result = outer(self, layer, query, key, value, kv_cache, metadata, output, *args, **kwargs)
        if tree is not None and not tree.all_rows:
            lens = tree.query_lens.sum().item()
            given.append((lens, metadata.num_actual_tokens, sum(rows_of_vllm[before:]), tree.uniform))
        return result

    rows_of_vllm = []

    def plain(self, layer, query, key, value, kv_cache, metadata, output, *args, **kwargs):
        rows_of_vllm.append(0 if metadata is None else metadata.num_actual_tokens)
        return honest(self, layer, query, key, value, kv_cache, metadata, output, *args, **kwargs)

    monkeypatch.setattr(interpreted._PagedReference, "forward", plain)
    monkeypatch.setattr(paged.TreeImpl, "forward", forward)
    return given


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts calls of the stand-in for vLLM's kernel")
def test_each_row_is_attended_to_once(engine, prompts, plain, monkeypatch):
    llm, given = engine("eagle", TREE, **SCARCE), attended(monkeypatch)
    assert runner_of(llm).speculator.trees.width == 10
    assert same(answers(llm, prompts), plain)
    assert given and all(tree_rows + rows_of_vllm == rows for tree_rows, rows, rows_of_vllm, _ in given)
    assert any(uniform for *_, uniform in given)
