"""Faults of CUDA graphs, of several ranks, and of what is refused."""

from __future__ import annotations

from tests.faults.fault import Fault

GPU, GROWTH = "vllm_specplug/gpu/", "tests/unit/hosts/test_growth.py::"
SWITCHES = "tests/unit/hosts/test_switches.py::"

GRAPH_FAULTS = [
    Fault(
        "draft graphs are captured outside vLLM's context",
        "graphs",
        GPU + "growth.py",
        "with graph_capture(device=inputs[0].device) as context:",
        'for context in [type("Context", (), {"stream": None})]:',
        GROWTH + "test_the_smallest_graph_that_fits_is_replayed",
    ),
    Fault(
        "draft graphs have a memory pool of their own",
        "graphs",
        GPU + "growth.py",
        "pool = current_platform.get_global_graph_pool()",
        "pool = object()",
        GROWTH + "test_graphs_share_the_memory_of_vllms",
    ),
    Fault(
        "kernels are compiled while communication is left out",
        "graphs",
        GPU + "growth.py",
        "            for size, parts in given.items():\n",
        "            for size, parts in given.items():\n                self._grow(size, *parts)\n",
        GROWTH + "test_the_smallest_graph_that_fits_is_replayed",
    ),
    Fault(
        "an unused request of a graph keeps its last slot",
        "graphs",
        GPU + "growth.py",
        "self._inputs[0][num_reqs:size].fill_(-1)",
        "pass",
        GROWTH + "test_the_smallest_graph_that_fits_is_replayed",
    ),
    Fault(
        "draft levels are captured without attention",
        "graphs",
        GPU + "drafters/eagle.py",
        "            self._has_cache = True  # vLLM may capture",
        "            # vLLM may capture",
        "tests/v2/test_identity.py::test_cuda_graphs[False]",
    ),
    Fault(
        "attention reserves partial results for graphs of trees",
        "graphs",
        GPU + "flash.py",
        "if self.max_num_splits and self._exceeds_vllms_graphs(common_attn_metadata):",
        "if False:",
        "tests/unit/hosts/test_graph_sizes.py::test_graphs_of_trees_reserve_no_more_than_vllms",
    ),
    Fault(
        "a guard hides an error from other ranks",
        "ranks",
        "vllm_specplug/core/guard.py",
        "            if self.raises:\n",
        "            if False:\n",
        "tests/unit/core/test_guard.py::test_with_several_ranks_an_error_ends_the_process",
    ),
    Fault(
        "the V2 runner's guard does not know of other ranks",
        "ranks",
        GPU + "drafters/base.py",
        "raises=several_ranks()",
        "raises=False",
        "tests/v2/test_example_drafter.py::test_with_several_ranks_a_fault_is_not_hidden",
    ),
    Fault(
        "batch-sharded sampling is served",
        "switches",
        "vllm_specplug/vllm/features.py",
        '_switched_on(s, "enable_batch_sharded_sampling")',
        "None",
        SWITCHES + "test_refused_switches_are_refused",
    ),
    Fault(
        "fast prefill of shared layers is served",
        "switches",
        "vllm_specplug/vllm/features.py",
        '_switched_on(s, "kv_sharing_fast_prefill")',
        "None",
        SWITCHES + "test_refused_switches_are_refused",
    ),
    Fault(
        "experts in answers are served",
        "switches",
        "vllm_specplug/vllm/features.py",
        'any(getattr(place, "enable_return_routed_experts", False) for place in places)',
        "False",
        SWITCHES + "test_refused_switches_are_refused",
    ),
    Fault(
        "elastic expert parallelism is served",
        "switches",
        GPU + "runner.py",
        "(self.parallel_config.enable_elastic_ep,",
        "(False,",
        SWITCHES + "test_the_v2_runner_refuses",
    ),
    Fault(
        "the compiler may let attention quantise its output",
        "switches",
        GPU + "attention.py",
        """kernels of trees do not.\"\"\"
        return False""",
        """kernels of trees do not.\"\"\"
        return True""",
        SWITCHES + "test_attention_of_trees_quantises_no_output",
    ),
]
