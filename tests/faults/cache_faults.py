"""Faults of KV caches of 8 bits, of kept answers and of sampled drafts on the V2 runner."""

from __future__ import annotations

from tests.faults.fault import Fault

CPU, GPU, V2 = "vllm_specplug/cpu/", "vllm_specplug/gpu/", "tests/v2/"

CACHE_FAULTS = [
    Fault(
        "tree rows of an 8-bit cache are not rounded",
        "fp8",
        GPU + "attention.py",
        "elif source is not None or kv_cache.dtype != key.dtype:  # vLLM has rounded what it wrote",
        "elif source is not None:",
        V2 + "test_fp8_caches.py::test_tree_rows_are_read_like_cached_rows",
    ),
    Fault(
        "keys of tree rows are rounded without their factor",
        "fp8",
        CPU + "attention.py",
        "            k_scale=layer._k_scale_float,\n",
        "            k_scale=1.0,\n",
        "tests/unit/kernels/test_fp8_caches.py::test_tree_rows_are_rounded_as_vllm_rounds_cached_rows",
    ),
    Fault(
        "values of 8 bits are not scaled",
        "fp8",
        GPU + "kernels/tree_attention.py",
        "    if value_scale_ptr is not None:\n",
        "    if value_scale_ptr is not None and SPLIT:\n",
        V2 + "test_fp8_caches.py::test_attention_over_8_bits",
    ),
    Fault(
        "keys of 8 bits in the pages lose their last bit",
        "fp8",
        CPU + "kernels/tree_attention.cpp",
        "(bytes & 0x7f) << shift",
        "(bytes & 0x7e) << shift",
        "tests/unit/kernels/test_fp8_caches.py::test_every_number_is_read",
    ),
    Fault(
        "sampled children of every level look at the root's noise",
        "sampling",
        GPU + "draft_sampling.py",
        "tl.load(positions_ptr + request) + level,",
        "tl.load(positions_ptr + request) + 0 * level,",
        V2 + "test_settling.py::test_children_in_three_launches",
    ),
    Fault(
        "lookup keeps tokens after a stop",
        "lookup",
        GPU + "kernels/lookup.py",
        "end = tl.minimum(tl.load(lens_ptr + slot), end)",
        "end = tl.load(lens_ptr + slot)",
        V2 + "test_lookup_kernels.py::test_traffic",
    ),
    Fault(
        "lookup reads one token past its traffic",
        "bounds",
        GPU + "kernels/lookup.py",
        "there = exists & ~is_own & (ahead <= capacity)",
        "there = exists & (ahead <= capacity)",
        V2 + "test_lookup_kernels.py::test_a_request_without_a_slot_drafts_nothing",
    ),
]
