"""CUDA graphs of tree batches, chosen by vLLM's own configuration and its manager of graphs; nothing is recorded."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from vllm.config import CompilationConfig, VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.worker.gpu import cudagraph_utils

from vllm_specplug.config import parse_options
from vllm_specplug.gpu.graph_sizes import capture_sizes, request_counts
from vllm_specplug.gpu.worker import TreeWorkerV2
from vllm_specplug.vllm.speculative_config import _chooses_graph_sizes

#: ``max_num_seqs`` and ``max_num_batched_tokens``: vLLM's on large and on smaller GPUs, and odd ones.
SIZES = [(1024, 8192), (256, 2048), (64, 8192), (256, 16384), (7, 500), (3, 40)]


def config(max_num_seqs, max_num_tokens, num_nodes, **given):
    """What vLLM makes of a setting, with ``TreeWorkerV2``'s change."""
    made = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=False),
        compilation_config=CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, **given),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_tokens),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=num_nodes,
            has_users_graph_sizes=bool(given),
            specplug=parse_options({"method": "lookup", "num_speculative_tokens": num_nodes, "traffic_tokens": 0}),
            uses_dynamic_speculative_decoding=lambda: False,
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        performance_mode="balanced",
        uniform_decode_query_len=1 + num_nodes,
        num_speculative_tokens=num_nodes,
    )
    VllmConfig._set_cudagraph_sizes(made)
    made.vllm_sizes = list(made.compilation_config.cudagraph_capture_sizes)
    return made


@pytest.fixture
def manager(monkeypatch):
    """``manager(config)``: vLLM's manager of graphs, as if all were recorded."""
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True))
    monkeypatch.setattr(type(current_platform), "_global_graph_pool", object(), raising=False)

    def make(made):
        found = cudagraph_utils.CudaGraphManager(
            made, torch.device("cpu"), CUDAGraphMode.FULL_AND_PIECEWISE, made.uniform_decode_query_len
        )
        found._graphs_captured = True
        return found

    return make


def full_graph(manager, num_reqs, width):
    """The requests of the full graph that runs a batch of trees; None: no graph."""
    found = manager.dispatch(num_reqs, num_reqs * width, width, 0)
    return found.num_reqs if found.cg_mode == CUDAGraphMode.FULL else None


@pytest.mark.parametrize("num_nodes", [3, 15, 31, 60, 63])
@pytest.mark.parametrize(("max_num_seqs", "max_num_tokens"), SIZES)
def test_every_batch_of_trees_has_a_full_graph(manager, max_num_seqs, max_num_tokens, num_nodes):
    made, width = config(max_num_seqs, max_num_tokens, num_nodes), 1 + num_nodes
    most = min(max_num_seqs, max_num_tokens // width)
    before = manager(made)
    TreeWorkerV2._capture_trees(SimpleNamespace(vllm_config=made))
    made.compilation_config.post_init_cudagraph_sizes()  # its own check
    after = manager(made)
    for num_reqs in range(1, most + 1):
        found = full_graph(after, num_reqs, width)
        assert found is not None and num_reqs <= found < max(num_reqs * 1.25, num_reqs + 1), num_reqs
    assert max(made.compilation_config.cudagraph_capture_sizes) <= max_num_tokens
    sizes = len(made.compilation_config.cudagraph_capture_sizes) - len(made.vllm_sizes)
    assert sizes <= len(request_counts(most)) <= 40
    if most * width > 512 and most > 512 // width:
        assert full_graph(before, most, width) is None  # vLLM alone runs such batches without a graph


def test_sizes_of_the_user_stay(tmp_path):
    arguments = partial(EngineArgs, model=str(tmp_path))  # a folder: no model hub is asked
    for given in ({"cudagraph_capture_sizes": [1, 2, 61]}, {"max_cudagraph_capture_size": 64}):
        made = config(1024, 8192, 60, **given)
        TreeWorkerV2._capture_trees(SimpleNamespace(vllm_config=made))
        assert made.compilation_config.cudagraph_capture_sizes == made.vllm_sizes
    assert not _chooses_graph_sizes(arguments())
    for given in ({"cudagraph_capture_sizes": [4]}, {"max_cudagraph_capture_size": 4}):
        assert _chooses_graph_sizes(arguments(**given))
        assert _chooses_graph_sizes(arguments(compilation_config=given))


def test_no_graphs_without_graphs():
    made = config(64, 2048, 60)
    made.compilation_config.cudagraph_capture_sizes = []
    TreeWorkerV2._capture_trees(SimpleNamespace(vllm_config=made))
    assert made.compilation_config.cudagraph_capture_sizes == []


def test_counts_of_requests():
    assert request_counts(1) == [1] and request_counts(5) == [1, 2, 3, 4, 5] and request_counts(9)[-2:] == [8, 9]
    assert request_counts(33) == [*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 33]
    assert len(request_counts(1024)) == 36
    assert capture_sizes([1, 2, 999], [16, 8], 2, 40) == [1, 2, 8, 16, 32]
