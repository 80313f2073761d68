"""Attention of tree rows over a paged context and a masked set of tree keys, on a CPU; and the way into the pages.

``tree_attention`` and ``write_rows`` are C++ ops where they can be built, else their references.  The context is read
from the host's packed pages as they are.  A page of one KV head is ``[K region | V region]``, each of
``block_size * head_size`` elements (probed on vLLM 0.32.0 with ``cpu_attn_reshape_and_cache``):

========== ===================================== =====================================
layout     K region                              V region
========== ===================================== =====================================
vec, vec16 ``[head_size][block_size]``           ``[block_size][head_size]``
amx        ``[block/16][head_size/2][16][2]``    ``[head_size/16][block/2][16][2]``
========== ===================================== =====================================

The reference and the input factory also know the layout of CUDA backends, ``token``: ``[block_size][K | V]``, a token's
key and value side by side.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_specplug.kernels.cpu_ops import operators

#: Layouts of the CPU op.
KV_LAYOUTS = ("vec", "vec16", "amx")
TOKEN_LAYOUT = "token"


def tree_attention(
    query: torch.Tensor,
    output: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_layout: str,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_start: torch.Tensor,
    query_lens: torch.Tensor,
    tree_key: torch.Tensor,
    tree_value: torch.Tensor,
    tree_start: torch.Tensor,
    tree_lens: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    kept: torch.Tensor | None = None,
) -> None:
    """Attends every query row to its request's whole context and to the tree rows its mask shows.

    A row that is shown nothing at all gets zeros.  Head size and block size are multiples of 16.

    Args:
        query: float32 or bfloat16 ``[num_tokens, num_heads, head_size]``; any strides but the last.
        output: as ``query``; only the rows that ``query_start`` and ``query_lens`` name are written.
        kv_cache: the host's cache of this layer, ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``.
        kv_layout: the host's packing, one of ``KV_LAYOUTS`` (the host's ``layer.isa``).
        block_table: int32 ``[num_reqs, max_blocks]``; entries behind the context are never read.
        context_lens: int32 ``[num_reqs]``; cached tokens, visible to every row of the request.
        query_start: int32 ``[num_reqs]``; the request's first row in ``query`` and ``output``.
        query_lens: int32 ``[num_reqs]``; the request's rows there; 0 leaves the request out.
        tree_key: ``[num_tree_rows, num_kv_heads, head_size]``, ``query``'s dtype; any strides but the last.
        tree_value: as ``tree_key``.
        tree_start: int32 ``[num_reqs]``; the request's first row in ``tree_key`` and ``tree_value``.
        tree_lens: int32 ``[num_reqs]``; the request's rows there.
        mask: bool ``[num_reqs, max_query_len, max_tree_len]``; row i attends to tree row j.
        scale: factor of the scores.
        kept: filled with ``tree_key`` and ``tree_value``: ``[2, num_tree_rows, num_kv_heads, head_size]``, contiguous.
    """
    _implementation()(
        query,
        output,
        kv_cache,
        kv_layout,
        block_table,
        context_lens,
        query_start,
        query_lens,
        tree_key,
        tree_value,
        tree_start,
        tree_lens,
        mask,
        scale,
        kept,
    )


def write_rows(
    kept: torch.Tensor, kv_caches: Sequence[torch.Tensor], kv_layout: str, rows: torch.Tensor, slots: torch.Tensor
) -> None:
    """Puts rows of every layer's key and value into slots of the host's pages.

    Args:
        kept: float32 or bfloat16 ``[num_layers, 2, num_rows, num_kv_heads, head_size]``, contiguous: keys and values.
        kv_caches: of each layer, as ``kv_cache`` of ``tree_attention``.
        kv_layout: the host's packing, one of ``KV_LAYOUTS``.
        rows: int64 ``[num_written]``; which of the rows.
        slots: int64 ``[num_written]``; where they go, ``block * block_size + offset``, each at most once.
    """
    ops = operators()
    if ops is None:
        return write_rows_reference(kept, kv_caches, kv_layout, rows, slots)
    ops.write_rows.default(kept, kv_caches, _is_amx(kv_layout), rows, slots)


def select_backend() -> str:
    """``cpp`` where the C++ op is built (or can be: some 20 s, once per machine), else ``torch``."""
    return "torch" if _implementation() is tree_attention_reference else "cpp"


@functools.cache
def _implementation() -> Callable[..., None]:
    ops = operators()
    if ops is None:
        return tree_attention_reference
    op = ops.tree_attention.default

    def call(query, output, kv_cache, kv_layout, *rest):
        op(query, output, kv_cache, _is_amx(kv_layout), *rest)

    return call


def _is_amx(kv_layout: str) -> bool:
    if kv_layout not in KV_LAYOUTS:
        raise ValueError(f"unknown kv_layout {kv_layout!r}; valid: {', '.join(KV_LAYOUTS)}")
    return kv_layout == "amx"


def tree_attention_reference(
    query: torch.Tensor,
    output: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_layout: str,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_start: torch.Tensor,
    query_lens: torch.Tensor,
    tree_key: torch.Tensor,
    tree_value: torch.Tensor,
    tree_start: torch.Tensor,
    tree_lens: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    kept: torch.Tensor | None = None,
) -> None:
    """``tree_attention`` in plain torch: float32 (float64 for float64 tensors) arithmetic, request by request."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    block_size = kv_cache.shape[2]
    group = query.shape[1] // kv_cache.shape[1]
    starts_and_lens = (context_lens, query_start, query_lens, tree_start, tree_lens)
    for r, (context, q0, rows, t0, nodes) in enumerate(zip(*(t.tolist() for t in starts_and_lens), strict=True)):
        if rows == 0:
            continue
        pages = kv_cache[block_table[r, : -(-context // block_size)].long()]
        context_key, context_value = (t[:, :context] for t in unpack_pages(pages, kv_layout))
        key = torch.cat([context_key, tree_key[t0 : t0 + nodes].transpose(0, 1)], dim=1).to(dtype)
        value = torch.cat([context_value, tree_value[t0 : t0 + nodes].transpose(0, 1)], dim=1).to(dtype)
        # [num_kv_heads, group, rows, head_size] against [num_kv_heads, 1, context + nodes, head_size]
        grouped = query[q0 : q0 + rows].to(dtype).unflatten(1, (-1, group)).permute(1, 2, 0, 3)
        scores = grouped @ key.unsqueeze(1).transpose(2, 3) * scale
        scores[..., context:].masked_fill_(~mask[r, :rows, :nodes], float("-inf"))
        weights = scores.softmax(dim=-1).nan_to_num(0.0)  # a row that is shown nothing
        result = (weights @ value.unsqueeze(1)).permute(2, 0, 1, 3).flatten(1, 2)
        output[q0 : q0 + rows] = result.to(output.dtype)
    if kept is not None:
        kept[0], kept[1] = tree_key, tree_value


def write_rows_reference(
    kept: torch.Tensor, kv_caches: Sequence[torch.Tensor], kv_layout: str, rows: torch.Tensor, slots: torch.Tensor
) -> None:
    """``write_rows`` in plain torch: page by page, unpacked and packed again."""
    for (key, value), kv_cache in zip(kept, kv_caches, strict=True):
        block_size = kv_cache.shape[2]
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            block, offset = divmod(slot, block_size)
            page = [t.clone() for t in unpack_pages(kv_cache[block : block + 1], kv_layout)]
            page[0][:, offset], page[1][:, offset] = key[row], value[row]
            kv_cache[block] = pack_pages(page[0][None], page[1][None], kv_layout)[0]


def unpack_pages(pages: torch.Tensor, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of ``[num_pages, num_kv_heads, block_size, 2 * head_size]`` pages.

    Returns:
        Two ``[num_kv_heads, num_pages * block_size, head_size]`` tensors.
    """
    num_pages, num_kv_heads, block_size, width = pages.shape
    head_size = width // 2
    if kv_layout == TOKEN_LAYOUT:
        key, value = pages.transpose(0, 1).flatten(1, 2).split(head_size, dim=-1)
        return key, value
    key, value = pages.reshape(num_pages, num_kv_heads, 2, block_size, head_size).unbind(2)
    shape = (num_pages, num_kv_heads)
    if _is_amx(kv_layout):
        key = key.reshape(*shape, block_size // 16, head_size // 2, 16, 2).permute(1, 0, 2, 4, 3, 5)
        value = value.reshape(*shape, head_size // 16, block_size // 2, 16, 2).permute(1, 0, 3, 5, 2, 4)
    else:
        key = key.reshape(*shape, head_size, block_size).permute(1, 0, 3, 2)
        value = value.transpose(0, 1)
    out_shape = (num_kv_heads, num_pages * block_size, head_size)
    return key.reshape(out_shape), value.reshape(out_shape)


def pack_pages(key: torch.Tensor, value: torch.Tensor, kv_layout: str) -> torch.Tensor:
    """The inverse of ``unpack_pages`` for one page per leading index.

    Args:
        key: ``[num_pages, num_kv_heads, block_size, head_size]``.
        value: as ``key``.
    """
    shape, (block_size, head_size) = key.shape[:2], key.shape[2:]
    if kv_layout == TOKEN_LAYOUT:
        return torch.cat([key, value], dim=-1)
    if _is_amx(kv_layout):
        key = key.reshape(*shape, block_size // 16, 16, head_size // 2, 2).transpose(3, 4)
        value = value.reshape(*shape, block_size // 2, 2, head_size // 16, 16).permute(0, 1, 4, 2, 5, 3)
    else:
        key = key.transpose(2, 3)
    packed = torch.cat([key.reshape(*shape, -1), value.reshape(*shape, -1)], dim=-1)
    return packed.view(*shape, block_size, 2 * head_size)


def make_inputs(
    context_lens: Sequence[int] = (100,),
    query_lens: Sequence[int] = (17,),
    *,
    tree_lens: Sequence[int] | None = None,
    num_heads: int = 9,
    num_kv_heads: int = 3,
    head_size: int = 64,
    block_size: int = 128,
    dtype: torch.dtype = torch.float32,
    kv_layout: str = "vec",
    causal: bool = False,
    garbage: float = float("nan"),
    gap: int = 1,
    seed: int = 0,
) -> dict[str, Any]:
    """Random keyword arguments of ``tree_attention``, for its tests and its benchmark.

    Pages are scattered in shuffled order and slots behind the context hold ``garbage``; ``query`` is a slice of a fused
    QKV tensor (non-contiguous) and ``tree_key``/``tree_value`` too; requests are separated by rows that belong to none.

    Args:
        context_lens: of each request.
        query_lens: of each request.
        tree_lens: of each request; ``query_lens`` by default (verification).
        causal: chain mask over the last ``query_len`` tree rows, in place of a random tree.
        garbage: what never-written slots, unused rows and ``output`` hold.
        gap: rows between two requests, and at both ends.
    """
    g = torch.Generator().manual_seed(seed)
    tree_lens = list(query_lens if tree_lens is None else tree_lens)
    num_reqs, rows, nodes = len(context_lens), max(query_lens), max(tree_lens)

    def starts(lens: Sequence[int]) -> torch.Tensor:
        gaps = torch.tensor([gap, *(n + gap for n in lens)], dtype=torch.int32)
        return gaps.cumsum(0, dtype=torch.int32)[:-1].contiguous()

    def ints(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32)

    pages_of = [-(-n // block_size) for n in context_lens]
    num_blocks = sum(pages_of) + 1
    order = torch.randperm(num_blocks, generator=g).to(torch.int32)
    block_table = torch.full((num_reqs, max(*pages_of, 1)), -1, dtype=torch.int32)
    contents = torch.full((2, num_blocks, num_kv_heads, block_size, head_size), garbage)
    used = 0
    for r, context in enumerate(context_lens):
        pages = order[used : used + pages_of[r]]
        block_table[r, : pages_of[r]] = pages
        used += pages_of[r]
        for i, page in enumerate(pages.tolist()):
            filled = min(block_size, context - i * block_size)
            contents[:, page, :, :filled] = torch.randn(2, num_kv_heads, filled, head_size, generator=g)
    key, value = contents.to(dtype)

    heads = num_heads + 2 * num_kv_heads
    query_rows, tree_rows = (sum(lens) + gap * (num_reqs + 1) for lens in (query_lens, tree_lens))
    fused = torch.randn(max(query_rows, tree_rows), heads, head_size, generator=g).to(dtype)
    query, tree_key, tree_value = fused.split([num_heads, num_kv_heads, num_kv_heads], dim=1)

    mask = torch.zeros(num_reqs, rows, nodes, dtype=torch.bool)
    for r, (q, t) in enumerate(zip(query_lens, tree_lens, strict=True)):
        tree = _chain_mask(t) if causal else _random_tree_mask(t, g)
        mask[r, : min(q, t), :t] = tree[max(0, t - q) :]
        mask[r, t:q, :t] = True  # more rows than nodes: the surplus sees them all
    return dict(
        query=query[:query_rows],
        output=torch.full((query_rows, num_heads, head_size), garbage).to(dtype),
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
        mask=mask,
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
