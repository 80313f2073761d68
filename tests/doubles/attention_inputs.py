"""The input factory of tree attention, shared by its tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_specplug.core.layout import ancestor_bits
from vllm_specplug.core.tree_rows import CpuTreeRows, DeviceTreeRows, KvPages
from vllm_specplug.cpu.kernels.tree_attention import PlainRows, causal_attention, pack_pages

#: Names of the tensors of ``TreeRows``.
ROWS = ("context_lens", "query_start", "query_lens", "tree_start", "tree_lens")


def cpu_arguments(**inputs: Any) -> dict[str, Any]:
    """Return arguments of the CPU's ``tree_attention``, from inputs of ``make_inputs`` and options."""
    pages = KvPages(inputs.pop("kv_cache"), inputs.pop("block_table"), inputs.pop("kv_layout"))
    tree = CpuTreeRows(**{name: inputs.pop(name) for name in ROWS}, mask=inputs.pop("mask"))
    return {"pages": pages, "tree": tree, **inputs}


def device_arguments(**inputs: Any) -> dict[str, Any]:
    """Return arguments of the device's ``tree_attention``, from inputs of ``make_inputs`` and options."""
    pages = KvPages(inputs.pop("kv_cache"), inputs.pop("block_table"), inputs.pop("kv_layout"))
    mask = inputs.pop("mask")
    rows = {name: inputs.pop(name) for name in (*ROWS, "max_context_len", "uniform") if name in inputs}
    tree = DeviceTreeRows(**rows, bits=ancestor_bits(mask), max_query_len=mask.shape[1])
    return {"pages": pages, "tree": tree, **inputs}


def attend(kernel: Callable[..., None], **inputs: Any) -> None:
    """Run a kernel with the arguments of ``cpu_arguments``."""
    kernel(**cpu_arguments(**inputs))


def attend_on_device(kernel: Callable[..., None], **inputs: Any) -> None:
    """Run a kernel with the arguments of ``device_arguments``."""
    kernel(**device_arguments(**inputs))


def attend_causally(**inputs: Any) -> None:
    """Run ``causal_attention`` on its inputs, with the names of ``make_inputs``, and ``seq_lens``."""
    pages = KvPages(inputs.pop("kv_cache"), inputs.pop("block_table"), inputs.pop("kv_layout"))
    rows = PlainRows(*(inputs.pop(name) for name in PlainRows._fields))
    causal_attention(pages=pages, rows=rows, **inputs)


def make_inputs(
    context_lens: Sequence[int] = (100,),
    query_lens: Sequence[int] = (17,),
    *,
    tree_lens: Sequence[int] | None = None,
    num_heads: int = 9,
    num_kv_heads: int = 3,
    head_size: int = 64,
    value_size: int | None = None,
    block_size: int = 128,
    dtype: torch.dtype = torch.float32,
    kv_layout: str = "vec",
    causal: bool = False,
    garbage: float = float("nan"),
    gap: int = 1,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Make random keyword arguments of ``attend``.

    Pages are in shuffled order; ``query``, ``tree_key`` and ``tree_value`` are slices of a fused QKV tensor
    (non-contiguous); rows that belong to no request separate the requests.

    Args:
        context_lens: per request.
        query_lens: per request.
        tree_lens: per request; by default ``query_lens`` (verification).
        value_size: of latents, whose values are the first part of the keys; None: there are keys and values.
        causal: use a chain mask over the last ``query_len`` tree rows instead of a random tree.
        garbage: value of never-written slots, of unused rows and of ``output``.
        gap: rows between two requests, and at both ends.
        device: on which everything is made; no large tensor is made elsewhere, or in another dtype.
    """
    g = torch.Generator(device).manual_seed(seed)
    place = {"generator": g, "device": device}
    tree_lens = list(query_lens if tree_lens is None else tree_lens)
    num_reqs, rows, nodes = len(context_lens), max(query_lens), max(tree_lens)

    def starts(lens: Sequence[int]) -> torch.Tensor:
        gaps = torch.tensor([gap, *(n + gap for n in lens)], dtype=torch.int32)
        return gaps.cumsum(0, dtype=torch.int32)[:-1].contiguous().to(device)

    def ints(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    pages_of = [-(-n // block_size) for n in context_lens]
    num_blocks = sum(pages_of) + 1
    order = torch.randperm(num_blocks, **place).to(torch.int32)
    block_table = torch.full((num_reqs, max(*pages_of, 1)), -1, dtype=torch.int32, device=device)
    filled = torch.zeros(num_blocks, dtype=torch.int32, device=device)  # slots of each page that are written
    used = 0
    for r, context in enumerate(context_lens):
        pages = order[used : used + pages_of[r]]
        block_table[r, : pages_of[r]] = pages
        used += pages_of[r]
        firsts = torch.arange(pages_of[r], dtype=torch.int32, device=device) * block_size
        filled[pages.long()] = (context - firsts).clamp(max=block_size)
    contents = torch.randn(2, num_blocks, num_kv_heads, block_size, head_size, dtype=dtype, **place)
    unwritten = torch.arange(block_size, device=device) >= filled.unsqueeze(1)
    contents.masked_fill_(unwritten[:, None, :, None], garbage)
    key, value = contents

    heads = num_heads + 2 * num_kv_heads
    query_rows, tree_rows = (sum(lens) + gap * (num_reqs + 1) for lens in (query_lens, tree_lens))
    fused = torch.randn(max(query_rows, tree_rows), heads, head_size, dtype=dtype, **place)
    query, tree_key, tree_value = fused.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if value_size is not None:
        tree_value = tree_key[..., :value_size]

    on_cpu = torch.Generator().manual_seed(seed)
    mask = torch.zeros(num_reqs, rows, nodes, dtype=torch.bool)
    for r, (q, t) in enumerate(zip(query_lens, tree_lens, strict=True)):
        tree = _chain_mask(t) if causal else _random_tree_mask(t, on_cpu)
        mask[r, : min(q, t), :t] = tree[max(0, t - q) :]
        mask[r, t:q, :t] = True  # more rows than nodes: the additional rows see all of them
    return dict(
        query=query[:query_rows],
        output=torch.full((query_rows, num_heads, value_size or head_size), garbage, dtype=dtype, device=device),
        kv_cache=pack_pages(key, value, kv_layout),
        kv_layout=kv_layout,
        block_table=block_table,
        context_lens=ints(context_lens),
        query_start=starts(query_lens),
        query_lens=ints(query_lens),
        tree_key=tree_key[:tree_rows],
        tree_value=tree_value[:tree_rows],
        tree_start=starts(tree_lens),
        tree_lens=ints(tree_lens),
        mask=mask.to(device),
        scale=head_size**-0.5,
    )


def _chain_mask(num_rows: int) -> torch.Tensor:
    return torch.ones(num_rows, num_rows, dtype=torch.bool).tril()


def _random_tree_mask(num_rows: int, generator: torch.Generator) -> torch.Tensor:
    mask = torch.eye(num_rows, dtype=torch.bool)
    for row in range(1, num_rows):
        parent = int(torch.randint(row, (1,), generator=generator))
        mask[row] |= mask[parent]
    return mask
