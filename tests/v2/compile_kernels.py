"""Compiles every launch of the Triton kernels, without a GPU; prints shared memory by kernel.

Run by ``test_compiling`` in a process of its own, since the interpreter's kernels cannot be compiled.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.doubles.attention_inputs import make_inputs
from tests.doubles.attention_reference import ReferenceContext
from vllm_specplug.core.layout import ancestor_bits
from vllm_specplug.kernels import triton_tiles, triton_tree_attention
from vllm_specplug.kernels.merged_tree_attention import merged_tree_attention
from vllm_specplug.kernels.tree_attention import TOKEN_LAYOUT
from vllm_specplug.kernels.triton_lookup import match_keys
from vllm_specplug.kernels.triton_step import cache_pointers, move_rows, stage_rows, store_trees, walk_rows


class Elsewhere:
    """Stands in for a CUDA driver, where nothing is launched."""

    def __init__(self, capability: int):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, _: int) -> int:
        return 0


def attention(rows: int, head_size: int, num_splits: int = 2, dtype: torch.dtype = torch.bfloat16) -> None:
    inputs = make_inputs(
        (40, 3), (rows, 2), num_heads=4, num_kv_heads=2, head_size=head_size, block_size=16, dtype=dtype,
        kv_layout=TOKEN_LAYOUT,
    )  # fmt: skip
    del inputs["kv_layout"]
    inputs["bits"] = ancestor_bits(inputs.pop("mask"))
    triton_tree_attention.tree_attention(**inputs, max_query_len=rows, num_splits=num_splits)
    if dtype == torch.bfloat16:  # of the other, which takes seconds, the larger one
        merged_tree_attention(ReferenceContext(), **inputs, max_query_len=rows)


def small_kernels(num_reqs: int = 2, width: int = 61) -> None:
    slots = torch.arange(num_reqs)
    parents, bits = torch.zeros(num_reqs, width, dtype=torch.int64), torch.zeros(num_reqs, width, 1, dtype=torch.int64)
    ints, offsets = torch.zeros(num_reqs, dtype=torch.int32), torch.zeros(num_reqs + 1, dtype=torch.int32)
    flat = torch.zeros(num_reqs * width, dtype=torch.int64)
    store_trees(parents, slots, parents, parents, bits, 6)
    stage_rows(slots.int(), offsets, ints, offsets, parents, bits, flat, ints, ints, ints, bits, num_reqs)
    _, path, _ = walk_rows(slots.int(), offsets, flat.int(), flat, parents)
    caches = [torch.zeros(2, 2, 16, 128, dtype=torch.bfloat16)]
    move_rows(cache_pointers(caches), caches[0], flat, path, path)
    for given in (slots.int(), slots):  # vLLM's, and those of a captured graph
        match_keys(torch.zeros(num_reqs, 4096, dtype=torch.int32), given, ints, 1, 16)


def main() -> None:
    compiled: dict[str, list[int]] = {}
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        assert "cubin" in kernel.asm
        name = f"{self.__name__} {driver.active.target.arch}"
        compiled.setdefault(name, []).append(kernel.metadata.shared)
        return kernel

    JITFunction.run = compile_only
    triton_tiles._shared_memory = lambda _: 227 << 10
    driver.set_active(Elsewhere(90))
    attention(1, 64)  # the smallest tiles
    attention(61, 64, num_splits=1)
    small_kernels()
    triton_tiles._shared_memory = lambda _: 99 << 10
    driver.set_active(Elsewhere(89))
    # The largest tiles on a device with little shared memory.
    attention(61, 128)
    attention(61, 256, num_splits=1, dtype=torch.float32)
    json.dump(compiled, sys.stdout)


if __name__ == "__main__":
    main()
