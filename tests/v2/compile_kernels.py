"""Compiles every launch of the Triton kernels for GPUs, without one; prints what each needs.

``python -m tests.v2.compile_kernels`` prints a table, with ``--short`` of the attention kernels only.
``test_compiling`` runs it with ``--json`` in a process of its own, since interpreted kernels cannot be compiled: the
launches of one GPU (``FEW``), of attention the largest ones (``LARGEST``); with ``--wide`` those of all GPUs, and all
launches of the reference.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.doubles.attention_inputs import ROWS, attend_on_device, make_inputs
from tests.doubles.attention_reference import ReferenceContext
from tests.doubles.interpreter import claim_backend
from vllm_specplug.core.attention_traits import NO_TRAITS, AttentionTraits
from vllm_specplug.core.tree_rows import DeviceTreeRows
from vllm_specplug.cpu.kernels.tree_attention import TOKEN_LAYOUT
from vllm_specplug.gpu.kernels import tiles as triton_tiles
from vllm_specplug.gpu.kernels import tree_attention as triton_tree_attention
from vllm_specplug.gpu.kernels.conv_tree import commit_windows, conv_tree
from vllm_specplug.gpu.kernels.gated_delta_tree import GatedDeltaWeights, gated_delta_tree
from vllm_specplug.gpu.kernels.growth import KERNELS, likeliest, start_levels
from vllm_specplug.gpu.kernels.latent_tree import continue_with_tree
from vllm_specplug.gpu.kernels.lookup import LookupBuffers, continuations, keep_answer, match_keys
from vllm_specplug.gpu.kernels.mamba2_tree import Mamba2Weights, mamba2_tree
from vllm_specplug.gpu.kernels.merged_tree_attention import merged_tree_attention
from vllm_specplug.gpu.kernels.row_tokens import row_tokens
from vllm_specplug.gpu.kernels.step import cache_pointers, move_rows, plan_step, stage_rows, store_trees, walk_rows
from vllm_specplug.gpu.kernels.tree_states import StateTrees
from vllm_specplug.proposers.union.device_proposer import Merging, merge_drafts
from vllm_specplug.proposers.union.learning import start_weights
from vllm_specplug.types import Walk
from vllm_specplug.utils.tables import format_table

#: Bytes of shared memory that a program can have, by compute capability.
SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
HEAD_SIZES = (64, 128, 256)
#: The GPU that every launch is compiled for.
REFERENCE = 90
#: Of a test that is not wide: the one with the least shared memory.
FEW = (120,)
#: Head sizes and case of the launches that need the most of a GPU's registers and shared memory.
LARGEST = ((128, 256), ("traits",))
COLUMNS = (
    *("kernel", "sm", "case", "head", "BLOCK_M", "BLOCK_N", "warps", "stages"),
    *("registers", "spilled", "shared", "vectors"),
)
#: Rows of the short table: kernel and case, and their name.
SHORT = {
    ("tree_attention_kernel", "plain"): "tree attention",
    ("tree_attention_kernel", "traits"): "tree attention, with window, soft cap, sinks, ALiBi",
    ("continue_kernel", "plain"): "masked part behind FlashAttention",
    ("continue_kernel", "traits"): "masked part behind FlashAttention, with soft cap, sinks",
}
#: The window is narrower than the mask, so that it is computed in the tree too.
TRAITS = {
    "plain": NO_TRAITS,
    "traits": AttentionTraits(window=9, soft_cap=30.0, sinks=torch.zeros(8), alibi_slopes=torch.zeros(8)),
}
MERGED_TRAITS = {"plain": NO_TRAITS, "traits": AttentionTraits(soft_cap=30.0, sinks=torch.zeros(8))}


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


class Compiled:
    """Collects a row of ``COLUMNS`` per compiled kernel; installed in place of ``JITFunction.run``."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.case, self._run = "", JITFunction.run

    def target(self, capability: int) -> None:
        driver.set_active(Elsewhere(capability))
        triton_tiles._shared_memory = lambda _: SHARED_MEMORY[capability]

    def __call__(self, function: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = self._run(function, *args, grid=grid, warmup=True, **kwargs)
        usage = resources(kernel.asm["cubin"])
        self.rows.append(
            {
                "kernel": function.__name__.strip("_"),
                "sm": driver.active.target.arch,
                "case": self.case,
                "head": kwargs.get("HEAD_SIZE", ""),
                "BLOCK_M": kwargs.get("BLOCK_M", ""),
                "BLOCK_N": kwargs.get("BLOCK_N", ""),
                "warps": kernel.metadata.num_warps,
                "stages": kernel.metadata.num_stages,
                "registers": usage["REG"],
                "spilled": usage["STACK"] + usage["LOCAL"],
                "shared": kernel.metadata.shared,
                # Loads of 16 bytes at once from global memory.
                "vectors": len(re.findall(r"(?:ld\.global\S*\.v4\.b32|cp\.async\.cg\S*)", kernel.asm["ptx"])),
            }
        )
        if not {"--json", "--short"} & set(sys.argv):
            print("| " + " | ".join(str(self.rows[-1][column]) for column in COLUMNS) + " |", flush=True)
        return kernel


def resources(cubin: bytes) -> dict[str, int]:
    """Read the registers and bytes of stack and local memory of a kernel."""
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run([program, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", shown)}


def attention(rows: int, head_size: int, case: str = "plain", splits: bool = True, dtype=torch.bfloat16) -> None:
    """Launch the tree attention and, in half precision, the continuation of a context's attention."""
    inputs = make_inputs(
        (40, 3), (rows, 2), num_heads=8, num_kv_heads=2, head_size=head_size, block_size=16, dtype=dtype,
        kv_layout=TOKEN_LAYOUT,
    )  # fmt: skip
    num_splits = 2 if splits else 1
    attend_on_device(triton_tree_attention.tree_attention, **inputs, num_splits=num_splits, traits=TRAITS[case])
    if splits and dtype != torch.float32:
        merged = partial(merged_tree_attention, ReferenceContext())
        attend_on_device(merged, **inputs, traits=MERGED_TRAITS[case])


def attention_over_8_bits(rows: int = 61, head_size: int = 128) -> None:
    """Launch the tree attention over an fp8 cache, with queries of 16 bits and of 8."""
    inputs = make_inputs(
        (40, 3), (rows, 2), num_heads=8, num_kv_heads=2, head_size=head_size, block_size=16, dtype=torch.bfloat16,
        kv_layout=TOKEN_LAYOUT,
    )  # fmt: skip
    fp8 = torch.float8_e4m3fn
    inputs |= {name: inputs[name].to(fp8) for name in ("kv_cache", "tree_key", "tree_value")}
    factors = torch.ones(2)
    for query, of_query in ((inputs["query"], None), (inputs["query"].to(fp8), factors)):
        scales = triton_tiles.CacheScales(of_query, factors, factors)
        inputs["query"] = query
        attend_on_device(triton_tree_attention.tree_attention, **inputs, num_splits=2, scales=scales)


def attention_over_latents(dtype: torch.dtype, num_reqs: int = 2, width: int = 61) -> None:
    """Launch the tree part over latents, with sizes of DeepSeek-V3 on eight ranks."""
    ints = torch.zeros(num_reqs, dtype=torch.int32)
    tree = DeviceTreeRows(
        **dict.fromkeys(ROWS, ints), bits=torch.zeros(num_reqs, width, 1, dtype=torch.int64), max_query_len=width
    )
    query = torch.zeros(num_reqs * width, 16, 576, dtype=dtype)
    context, sums = torch.zeros(num_reqs, width * 16, 512), torch.zeros(num_reqs, width * 16)
    continue_with_tree(query, query[..., :512].contiguous(), context, sums, tree, query[:, 0].contiguous(), 1.0)


def small_kernels(num_reqs: int = 2, width: int = 61) -> None:
    slots = torch.arange(num_reqs)
    parents, bits = torch.zeros(num_reqs, width, dtype=torch.int64), torch.zeros(num_reqs, width, 1, dtype=torch.int64)
    ints, offsets = torch.zeros(num_reqs, dtype=torch.int32), torch.zeros(num_reqs + 1, dtype=torch.int32)
    flat = torch.zeros(num_reqs * width, dtype=torch.int64)
    store_trees(parents, slots, parents, parents, bits, 6)
    stage_rows(slots.int(), offsets, ints, offsets, parents, bits, flat, ints, ints, ints, bits, num_reqs)
    _, path, _ = walk_rows(slots.int(), offsets, flat.int(), flat, parents)
    row_tokens(flat, flat.int(), flat.int(), flat.int(), flat, parents, ints)
    caches = [torch.zeros(2, 2, 16, 256, dtype=torch.bfloat16)]
    move_rows(cache_pointers(caches), caches[0], flat, path, path)
    plan_step(Walk(path, path, ints), ints, num_reqs * width)
    tokens = torch.zeros(num_reqs, 4096, dtype=torch.int32)
    buffers = LookupBuffers(
        torch.zeros(20, dtype=torch.float64), torch.zeros(num_reqs, 128, dtype=torch.int64),
        torch.zeros(num_reqs, 3, 8, dtype=torch.int32), torch.zeros((1 << 17) + 1, dtype=torch.int32),
        torch.zeros((1 << 17) + 1, dtype=torch.int64), torch.zeros(2, dtype=torch.int32),
    )  # fmt: skip
    keep_answer(tokens, ints, slots, 1, 10, 20, longer_than=3, buffers=buffers)
    for given in (slots.int(), slots):  # vLLM's, and those of a captured graph
        match_keys(tokens, given, ints, 1, 16)
        continuations(
            tokens, given, ints, slots, min_match=1, max_match=16, max_candidates=8, draft_depth=16,
            min_traffic_match=3, buffers=buffers,
        )  # fmt: skip
        start_levels(given, slots, 5, 10, 4095)


def state_kernels(num_reqs: int = 2, width: int = 61) -> None:
    """Launch the kernels of recurrent states, with sizes of published models."""
    ints, half = torch.zeros(num_reqs, dtype=torch.int32), torch.bfloat16
    bits = torch.zeros(num_reqs, width, 1, dtype=torch.int64)
    trees = StateTrees(ints, ints, ints, ints, bits, max_rows=width)
    sources = torch.zeros(num_reqs, 8, dtype=torch.int64)
    inputs, gates = torch.zeros(num_reqs * width, 8192, dtype=half), torch.zeros(num_reqs * width, 64, dtype=half)
    for channels_first in (True, False):
        windows = torch.zeros(4, 8192, 3, dtype=half) if channels_first else torch.zeros(4, 3, 8192, dtype=half).mT
        conv_tree(trees, inputs, windows, torch.zeros(8192, 4, dtype=half), inputs[0], inputs, silu=True)
        commit_windows(trees, sources, inputs, windows)
    floats = torch.zeros(64)
    for dtype in (torch.float32, half):
        mamba2, delta = Mamba2Weights(floats, floats, floats, 8), GatedDeltaWeights(floats, floats, 16)
        states = torch.zeros(4, 64, 64, 128, dtype=dtype)
        mamba2_tree(trees, mamba2, inputs, gates, states, inputs)
        mamba2_tree(trees, mamba2, inputs, gates, states, source_rows=sources)
        states = torch.zeros(4, 32, 128, 128, dtype=dtype)
        gated_delta_tree(trees, delta, inputs, gates, gates, states, inputs)
        gated_delta_tree(trees, delta, inputs, gates, gates, states, source_rows=sources)


def sampling_kernels(num_nodes: int = 20) -> None:
    """Launch what calls vLLM's own functions; they are compiled with it."""
    claim_backend()
    from vllm_specplug.gpu.draft_sampling import DeviceDraftSampling, sampler_noise

    backends.pop("cpu", None)  # it has no compiler
    tokens, nodes = torch.zeros(num_nodes, 64, dtype=torch.int64), torch.zeros(num_nodes, dtype=torch.int64)
    for use_fp64 in (False, True):
        sampler_noise(tokens, nodes, nodes, use_fp64)
        floats, slots = torch.zeros(2, 4), nodes[:2]
        sampling = DeviceDraftSampling(
            floats[:, 0], slots, floats[:, 1], slots, slots.bool(), slots, rejects=False, use_fp64=use_fp64
        )
        sampling.children(torch.zeros(num_nodes, 32000, dtype=torch.bfloat16), 1, 10)


def draft_kernels(num_reqs: int = 2, top_k: int = 10, depth: int = 8, num_nodes: int = 63) -> None:
    """Launch the growth of trees and the merging of two of them."""
    roots = torch.zeros(num_reqs, dtype=torch.int64)
    for dtype, ids in ((torch.bfloat16, None), (torch.float32, torch.zeros(32000, dtype=torch.int64))):
        likeliest(torch.zeros(num_reqs, 32000, dtype=dtype), top_k, ids)
    pool, beam = KERNELS.new_pool(num_reqs, top_k, depth, "cpu"), None
    for level in range(depth):
        ids = torch.zeros(num_reqs * (top_k if level else 1), top_k, dtype=torch.int64)
        beam = KERNELS.grow_level(pool, beam, ids, ids.float(), num_nodes)
    draft, _ = KERNELS.rerank_draft(pool, roots, num_nodes)
    merge_drafts([draft, draft], num_nodes, Merging.make(start_weights(2), [draft, draft], num_reqs))


def compile_all(gpus: Collection[int] = tuple(SHARED_MEMORY), largest_only: bool = False) -> list[dict[str, Any]]:
    """Compile; return a row per kernel.

    Args:
        gpus: their compute capabilities.
        largest_only: of attention, on all GPUs but ``REFERENCE``.
    """
    compiled = Compiled()
    JITFunction.run = lambda self, *args, **kwargs: compiled(self, *args, **kwargs)
    for capability in gpus:
        compiled.target(capability)
        few = largest_only and capability != REFERENCE
        heads, cases = LARGEST if few else (HEAD_SIZES, tuple(TRAITS))
        for head_size in heads:
            for compiled.case in cases:
                attention(61, head_size, compiled.case)
        if capability >= 89:  # vLLM has fp8 caches there
            compiled.case = "fp8"
            attention_over_8_bits()
        if few and gpus != FEW:
            continue
        compiled.case = "float32"
        attention(61, 256, dtype=torch.float32)
    compiled.case = "float16, smallest"
    attention(1, 64, splits=False, dtype=torch.float16)
    compiled.case = ""
    for capability in gpus:
        compiled.target(capability)
        for dtype in (torch.bfloat16, torch.float32):
            attention_over_latents(dtype)
        small_kernels()
        state_kernels()
        sampling_kernels()
        draft_kernels()
    return compiled.rows


def short_table(rows: list[dict[str, Any]]) -> str:
    """Return registers, bytes spilled and shared memory of the attention kernels by head size and capability."""
    found = {(row["kernel"], row["case"], row["head"], row["sm"]): row for row in rows}
    body = []
    for (kernel, case), name in SHORT.items():
        for head in HEAD_SIZES:
            cells = (found[kernel, case, head, sm] for sm in SHARED_MEMORY)
            numbers = [f"{row['registers']}, {row['spilled']}, {row['shared'] / 1024:.0f} KiB" for row in cells]
            body.append([f"{name}, {head}", *numbers])
    return format_table(["kernel, head size", *(f"sm_{sm}" for sm in SHARED_MEMORY)], body, markdown=True)


def main() -> None:
    as_json, short = "--json" in sys.argv, "--short" in sys.argv
    if not as_json and not short:
        print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS))
    gpus = FEW if as_json and "--wide" not in sys.argv else tuple(SHARED_MEMORY)
    rows = compile_all(gpus, largest_only=as_json)
    if as_json:
        json.dump(rows, sys.stdout)
    elif short:
        print(short_table(rows))


if __name__ == "__main__":
    main()
