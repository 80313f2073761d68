"""CUDA graphs of tree batches, chosen by vLLM's own configuration and its manager of graphs; nothing is recorded.

Also the metadata of vLLM's FlashAttention 3 for these graphs; its kernels are not there.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from vllm.config import CompilationConfig, VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention.backends import flash_attn
from vllm.v1.worker.gpu import cudagraph_utils, dp_utils

from vllm_specplug.config import parse_options
from vllm_specplug.gpu.flash import TreeFlashMetadataBuilder
from vllm_specplug.gpu.graph_sizes import request_counts
from vllm_specplug.gpu.rounds import most_rows, shapes
from vllm_specplug.gpu.tree_graphs import wrap_init_candidates
from vllm_specplug.vllm.speculative_config import _chooses_graph_sizes

#: ``max_num_seqs`` and ``max_num_batched_tokens``: vLLM's on large and on smaller GPUs, and odd ones.
SIZES = [(1024, 8192), (256, 2048), (64, 8192), (256, 16384), (33, 8192), (7, 500), (3, 40)]
FULL = CUDAGraphMode.FULL


def config(max_num_seqs, max_num_tokens, num_nodes, budget="fixed", **given):
    """What vLLM makes of a setting."""
    options = {"method": "lookup", "num_speculative_tokens": num_nodes, "traffic_tokens": 0, "budget": budget}
    made = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=False),
        compilation_config=CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, **given),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_tokens),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=num_nodes,
            has_users_graph_sizes=bool(given),
            specplug=parse_options(options),
            uses_dynamic_speculative_decoding=lambda: False,
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        performance_mode="balanced",
        uniform_decode_query_len=1 + num_nodes,
        num_speculative_tokens=num_nodes,
    )
    VllmConfig._set_cudagraph_sizes(made)
    return made


@pytest.fixture
def manager(monkeypatch):
    """``manager(config, with_trees)``: vLLM's manager of graphs, as if all were recorded."""
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True))
    monkeypatch.setattr(type(current_platform), "_global_graph_pool", object(), raising=False)
    kind = cudagraph_utils.CudaGraphManager

    def make(made, with_trees=True, width=None, loras=None):
        with monkeypatch.context() as patch:
            if with_trees:
                patch.setattr(kind, "_init_candidates", wrap_init_candidates(kind._init_candidates))
            mode, width = CUDAGraphMode.FULL_AND_PIECEWISE, width or made.uniform_decode_query_len
            found = kind(made, torch.device("cpu"), mode, width, loras)
        found._graphs_captured = True
        return found

    return make


def full_graph(manager, num_reqs, width, loras=0):
    """The requests of the full graph that runs a batch of trees; None: no graph."""
    found = manager.dispatch(num_reqs, num_reqs * width, width, loras)
    return found.num_reqs if found.cg_mode == FULL else None


@pytest.mark.parametrize("budget", ["fixed", "measured"])
@pytest.mark.parametrize("num_nodes", [3, 15, 31, 60, 63])
@pytest.mark.parametrize(("max_num_seqs", "max_num_tokens"), SIZES)
def test_every_batch_of_trees_has_a_full_graph(manager, max_num_seqs, max_num_tokens, num_nodes, budget):
    made = config(max_num_seqs, max_num_tokens, num_nodes, budget)
    before, after = manager(made, with_trees=False), manager(made)
    graphs = 0
    for shape in shapes(made.speculative_config.specplug):
        width = 1 + shape.nodes
        most = min(max_num_seqs, most_rows(made.speculative_config.specplug, max_num_tokens) // width)
        for num_reqs in range(1, most + 1):
            found = full_graph(after, num_reqs, width)
            assert found is not None and num_reqs <= found < max(num_reqs * 1.25, num_reqs + 1), (width, num_reqs)
        graphs += len(request_counts(most)) if most else 0
        assert len(request_counts(most)) <= 40
        if most * width > 512 and most > 512 // width:
            assert full_graph(before, most, width) is None  # vLLM alone runs such batches without a graph
    plain = [graph for graph in after._capture_descs[FULL] if graph.uniform_token_count == 1]
    assert len(after._capture_descs[FULL]) == graphs + len(plain)
    sizes = made.compilation_config.cudagraph_capture_sizes
    added = max_num_seqs < max(sizes) and max_num_seqs not in sizes
    assert len(plain) == (sum(size <= max_num_seqs for size in sizes) + added if budget == "measured" else 0)
    if budget == "measured":
        for num_reqs in range(1, min(max_num_seqs, max(sizes)) + 1):
            assert full_graph(after, num_reqs, 1) is not None, num_reqs


@pytest.mark.parametrize("budget", ["fixed", "measured"])
@pytest.mark.parametrize("num_nodes", [60, 63])
def test_prompts_run_as_without_trees(manager, num_nodes, budget):
    """Padded to vLLM's own sizes, from the same piecewise graphs; none above them."""
    made = config(256, 8192, num_nodes, budget)
    before, after = (manager(made, with_trees, loras=[0, 2]) for with_trees in (False, True))
    for loras in (0, 2):
        for num_tokens in range(1, 8193):
            ours, theirs = (one.dispatch(3, num_tokens, None, loras) for one in (after, before))
            assert ours == theirs and ours.num_tokens < num_tokens + 16
        assert full_graph(after, 30, 1 + num_nodes, loras)
    piecewise = CUDAGraphMode.PIECEWISE
    assert after._capture_descs[piecewise] == before._capture_descs[piecewise]
    assert made.compilation_config.max_cudagraph_capture_size == 512


def test_graphs_of_chains_stay(manager):
    """vLLM's manager of chain drafts, and any engine without our methods."""
    made = config(256, 8192, 60)
    assert manager(made, width=1)._candidates == manager(made, with_trees=False, width=1)._candidates
    made.speculative_config.specplug = None
    assert manager(made)._candidates == manager(made, with_trees=False)._candidates


def test_sizes_of_the_user_stay(manager, tmp_path):
    arguments = partial(EngineArgs, model=str(tmp_path))  # a folder: no model hub is asked
    for given in ({"cudagraph_capture_sizes": [1, 2, 61]}, {"max_cudagraph_capture_size": 64}):
        made = config(1024, 8192, 60, **given)
        before, after = manager(made, with_trees=False), manager(made)
        assert set(after._capture_descs[FULL]) == set(before._capture_descs[FULL])
    assert not _chooses_graph_sizes(arguments())
    for given in ({"cudagraph_capture_sizes": [4]}, {"max_cudagraph_capture_size": 4}):
        assert _chooses_graph_sizes(arguments(**given))
        assert _chooses_graph_sizes(arguments(compilation_config=given))


def test_no_graphs_without_graphs(manager):
    made = config(64, 2048, 60)
    made.compilation_config.cudagraph_capture_sizes = []
    assert not manager(made)._capture_descs


def test_counts_of_requests():
    assert request_counts(1) == [1] and request_counts(5) == [1, 2, 3, 4, 5] and request_counts(9)[-2:] == [8, 9]
    assert request_counts(33) == [*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 33]
    assert len(request_counts(1024)) == 36


# ---- memory of the recorded calls of FlashAttention 3

#: Query heads, KV heads and size of a head: of a target of 32B.
HEADS = (64, 8, 128)
#: What vLLM's own graphs of a target of 32B reserve, at 512 rows and 32 parts.
OWN_BYTES = 32 * 512 * 64 * 128 * 4


@pytest.fixture
def builder(monkeypatch):
    """``builder(config)``: our builder as on Hopper; FlashAttention's planning returns the number of parts."""

    def plan(num_splits, **given):
        return torch.full((1,), num_splits, dtype=torch.int32)

    monkeypatch.setattr(flash_attn, "get_flash_attn_version", lambda **_: 3)
    monkeypatch.setattr(flash_attn, "get_scheduler_metadata", plan, raising=False)
    monkeypatch.setattr(flash_attn, "get_num_attention_heads_from_layers", lambda *_: HEADS[0])
    monkeypatch.setattr(flash_attn, "get_dcp_world_size_and_rank", lambda _: (1, 0))
    monkeypatch.setattr(flash_attn, "_get_sliding_window_configs", lambda _: {None})

    def make(made, kind=TreeFlashMetadataBuilder):
        made.model_config = SimpleNamespace(
            hf_config=SimpleNamespace(model_type="llama"), rswa_window=None, is_mm_prefix_lm=False
        )
        made.cache_config.cache_dtype = "auto"
        made.parallel_config.cp_kv_cache_interleave_size = 1
        made.kernel_config = SimpleNamespace(enable_jit_warmup=False)
        made.attention_config = SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=32)
        spec = SimpleNamespace(
            num_kv_heads=HEADS[1], head_size=HEADS[2], block_size=16, dtype=torch.bfloat16, dcp_sharded=False
        )
        return kind(spec, [], made, torch.device("cpu"))

    return make


def batch_of(num_reqs, width):
    """vLLM's description of a batch, for its builder of metadata."""
    starts = torch.arange(num_reqs + 1, dtype=torch.int32) * width
    return SimpleNamespace(
        num_reqs=num_reqs, num_actual_tokens=num_reqs * width, max_query_len=width, max_seq_len=4096,
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=torch.full((num_reqs,), 4096),
        block_table_tensor=None, slot_mapping=None, causal=True, mm_req_doc_ranges=None, seq_lens_cpu_upper_bound=None,
    )  # fmt: skip


def reserved(metadata):
    """Bytes of the parts that a recorded call keeps: float32, one output for each part."""
    splits = metadata.max_num_splits
    assert int(metadata.scheduler_metadata[0]) == splits  # planned for as many
    return splits * metadata.num_actual_tokens * HEADS[0] * HEADS[2] * 4 * (splits > 1)


@pytest.mark.parametrize("budget", ["fixed", "measured"])
def test_graphs_of_trees_reserve_no_more_than_vllms(manager, builder, budget):
    made = config(256, 8192, 63, budget)
    ours = builder(made)
    graphs = manager(made)._capture_descs[FULL]
    assert max(graph.num_tokens for graph in graphs) == most_rows(made.speculative_config.specplug, 8192)
    found = []
    for graph in graphs:
        metadata = ours.build(0, batch_of(graph.num_reqs, graph.uniform_token_count))
        assert metadata.max_num_splits > 0  # 0: parts by the contexts, which a graph cannot follow
        found.append(reserved(metadata))
    assert max(found) == OWN_BYTES


def test_other_batches_are_planned_as_by_vllm(builder):
    made = config(256, 8192, 63)
    ours, theirs = builder(made), builder(made, flash_attn.FlashAttentionMetadataBuilder)
    for shape in ((1, 700), (3, 512), (2, 1000), (8, 64), (1, 1)):
        assert ours.build(0, batch_of(*shape)).max_num_splits == theirs.build(0, batch_of(*shape)).max_num_splits


# ---- replicas that run each step together


def together(monkeypatch, manager, *steps):
    """What vLLM runs on each replica for its step ``(num_reqs, num_tokens, width)``, as they agree on it."""
    told, group = [], SimpleNamespace(cpu_group=None)
    monkeypatch.setattr(dp_utils, "get_dp_group", lambda: group)
    answers = [
        lambda tensor, group=None: told.append(tensor.clone()),
        lambda tensor, group=None: tensor.copy_(sum(told)),
    ]
    for group.cpu_all_reduce_ in answers:  # first each is heard, then each is told the sum
        if hasattr(dp_utils, "dist"):  # before vLLM 0.33
            monkeypatch.setattr(dp_utils.dist, "all_reduce", group.cpu_all_reduce_)
        found = [
            dp_utils.dispatch_cg_and_sync_dp(manager, num_reqs, num_tokens, width, len(steps), rank)[0]
            for rank, (num_reqs, num_tokens, width) in enumerate(steps)
        ]
    return found


@pytest.mark.parametrize("most", [5, 200])
def test_replicas_with_trees_share_a_graph(manager, monkeypatch, most):
    """Of the batch of the fullest replica; one without requests runs it too, on a tree of its own."""
    width = 16
    made = manager(config(256, 8192, width - 1))
    steps = [(2, 2 * width, width), (most, most * width, width), (1, width, width)]
    found = together(monkeypatch, made, *steps)
    assert found[0] == found[1] == found[2]
    assert found[0].cg_mode == FULL and found[0].uniform_token_count == width
    assert most <= found[0].num_reqs < max(most * 1.25, most + 1)


@pytest.mark.parametrize(("prompt", "num_tokens"), [(100, [640, 640, 640]), (3000, [640, 3000, 16])])
def test_replicas_with_other_steps_run_without_graphs(manager, monkeypatch, prompt, num_tokens):
    """While one reads a prompt.  All have as many rows, unless one of them has no graph for its own step."""
    width = 16
    made = manager(config(256, 8192, width - 1))
    found = together(monkeypatch, made, (40, 40 * width, width), (3, prompt, None), (1, width, width))
    assert {one.cg_mode for one in found} == {CUDAGraphMode.NONE}
    assert [one.num_tokens for one in found] == num_tokens


def test_control_with_a_raised_limit_the_memory_grows(builder):
    """The whole limit raised to the largest trees, as vLLM's own builder would take it."""
    made = config(256, 8192, 63)
    made.compilation_config.max_cudagraph_capture_size = 8192
    found = builder(made, flash_attn.FlashAttentionMetadataBuilder).build(0, batch_of(128, 64))
    assert reserved(found) == 16 * OWN_BYTES == 8589934592
