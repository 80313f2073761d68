"""Tree attention on a CPU, over a paged context and masked tree keys; and writing rows into the pages.

``tree_attention`` and ``write_rows`` are C++ ops where they can be built, else their references in torch.  They work on
vLLM's packed pages directly.  A page of one KV head is ``[K region | V region]``, each of ``block_size * head_size``
elements (determined on vLLM 0.32.0 with ``cpu_attn_reshape_and_cache``):

========== ===================================== =====================================
layout     K region                              V region
========== ===================================== =====================================
vec, vec16 ``[head_size][block_size]``           ``[block_size][head_size]``
amx        ``[block/16][head_size/2][16][2]``    ``[head_size/16][block/2][16][2]``
========== ===================================== =====================================

Pages of latents (MLA) have the layout ``latent``: ``[block_size][head_size]``, one KV head.  A token's value is the
first ``value_size`` numbers of its key.

The references also support the layout of CUDA backends, ``token``: ``[block_size][K | V]``, a token's key and value
side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from vllm_specplug.core.attention_traits import NO_TRAITS, AttentionTraits
from vllm_specplug.core.tree_rows import CpuTreeRows, KvPages
from vllm_specplug.cpu.kernels.cpu_ops import operators

#: Layouts of the CPU op, and the op's numbers for them.
KV_LAYOUTS = {"vec": 0, "vec16": 0, "amx": 1, "latent": 2}
TOKEN_LAYOUT = "token"
LATENT_LAYOUT = "latent"


class PlainRows(NamedTuple):
    """Rows without trees: of each request its last tokens.

    Attributes:
        seq_lens: int32 ``[num_reqs]``; tokens of the request in the pages.
        query_start, query_lens: int32 ``[num_reqs]``; the request's rows in the flat batch; 0 rows leave it out.
    """

    seq_lens: torch.Tensor
    query_start: torch.Tensor
    query_lens: torch.Tensor


def tree_attention(
    query: torch.Tensor,
    output: torch.Tensor,
    pages: KvPages,
    tree: CpuTreeRows,
    tree_key: torch.Tensor,
    tree_value: torch.Tensor,
    scale: float,
    kept: torch.Tensor | None = None,
    traits: AttentionTraits = NO_TRAITS,
    value_scale: float = 1.0,
) -> None:
    """Attend from every query row to its request's whole context and to the tree rows that its mask shows.

    A row without visible keys gets zeros.  Head size and block size are multiples of 16.

    Args:
        query: float32, bfloat16 or float16 ``[num_tokens, num_heads, head_size]``; any strides but the last.
        output: ``[num_tokens, num_heads, value_size]``; only the rows that the tree names are written.  ``value_size``
            is ``head_size``, or less with latents.
        pages: of ``query``'s dtype, float8_e4m3fn or float8_e5m2; the layout is one of ``KV_LAYOUTS`` (vLLM's
            ``layer.isa``).
        tree: the rows; those of ``query`` and of ``tree_key``.
        tree_key: ``[num_tree_rows, num_kv_heads, head_size]``, the dtype of the pages; any strides but the last.
        tree_value: as ``tree_key``, of ``value_size``.
        scale: factor of the scores; that of 8-bit keys is in it.
        kept: receives copies of ``tree_key`` and ``tree_value``: ``[2, num_tree_rows, num_kv_heads, head_size]``,
            contiguous; of latents ``[1, ...]``, without the values.
        traits: what the layer adds to plain softmax.  Distances are counted along a row's visible keys: its context,
            then the tree rows that its mask shows, in order.
        value_scale: factor of the output: that of 8-bit values.
    """
    ops = operators()
    if ops is None:
        return tree_attention_reference(
            query, output, pages, tree, tree_key, tree_value, scale, kept, traits, value_scale
        )
    ops.tree_attention.default(
        query,
        output,
        pages.kv_cache,
        _number_of(pages.layout),
        pages.block_table,
        tree.context_lens,
        tree.query_start,
        tree.query_lens,
        tree_key,
        tree_value,
        tree.tree_start,
        tree.tree_lens,
        tree.mask,
        scale,
        value_scale,
        kept,
        *traits.as_arguments,
    )


def causal_attention(
    query: torch.Tensor,
    output: torch.Tensor,
    pages: KvPages,
    rows: PlainRows,
    scale: float,
    traits: AttentionTraits = NO_TRAITS,
    value_scale: float = 1.0,
) -> None:
    """Attend from the last tokens of each request to themselves and to all tokens before them, which are in the pages.

    It is in C++ only.

    Args:
        query, output, pages, scale, traits, value_scale: see ``tree_attention``.
        rows: of each request.
    """
    ops = operators()
    assert ops is not None
    op, layout = ops.causal_attention.default, _number_of(pages.layout)
    op(query, output, pages.kv_cache, layout, pages.block_table, *rows, scale, value_scale, *traits.as_arguments)


def write_rows(
    kept: torch.Tensor, kv_caches: Sequence[torch.Tensor], kv_layout: str, rows: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write rows of every layer's keys and values into slots of vLLM's pages.

    Args:
        kept: float32, bfloat16, float16 or uint8 (8-bit floats) ``[num_layers, 2, num_rows, num_kv_heads,
            head_size]``, contiguous; keys, then values.  Of latents ``[num_layers, 1, ...]``.
        kv_caches: one per layer, as ``KvPages.kv_cache``.
        kv_layout: how vLLM packs the pages, one of ``KV_LAYOUTS``.
        rows: int64 ``[num_written]``; the rows of ``kept`` to write.
        slots: int64 ``[num_written]``; their target slots, ``block * block_size + offset``, all different.
    """
    ops = operators()
    if ops is None:
        return write_rows_reference(kept, kv_caches, kv_layout, rows, slots)
    ops.write_rows.default(kept, kv_caches, _number_of(kv_layout), rows, slots)


def select_backend() -> str:
    """Return ``cpp`` if the C++ op can be used, else ``torch``.  The op is built if needed (20 s, once per machine)."""
    return "torch" if operators() is None else "cpp"


def _number_of(kv_layout: str) -> int:
    if kv_layout not in KV_LAYOUTS:
        raise ValueError(f"unknown kv_layout {kv_layout!r}; valid: {', '.join(KV_LAYOUTS)}")
    return KV_LAYOUTS[kv_layout]


def tree_attention_reference(
    query: torch.Tensor,
    output: torch.Tensor,
    pages: KvPages,
    tree: CpuTreeRows,
    tree_key: torch.Tensor,
    tree_value: torch.Tensor,
    scale: float,
    kept: torch.Tensor | None = None,
    traits: AttentionTraits = NO_TRAITS,
    value_scale: float = 1.0,
) -> None:
    """Compute ``tree_attention`` in plain torch, request by request, in float32 (float64 for float64 tensors)."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    kv_cache, block_table, kv_layout = pages
    block_size = kv_cache.shape[2]
    group = query.shape[1] // kv_cache.shape[1]
    starts_and_lens = (tree.context_lens, tree.query_start, tree.query_lens, tree.tree_start, tree.tree_lens)
    for r, (context, q0, rows, t0, nodes) in enumerate(zip(*(t.tolist() for t in starts_and_lens), strict=True)):
        if rows == 0:
            continue
        used = kv_cache[block_table[r, : -(-context // block_size)].long()].to(dtype)
        context_key, context_value = (t[:, :context] for t in unpack_pages(used, kv_layout, output.shape[2]))
        key = torch.cat([context_key, tree_key[t0 : t0 + nodes].transpose(0, 1).to(dtype)], dim=1)
        value = torch.cat([context_value, tree_value[t0 : t0 + nodes].transpose(0, 1).to(dtype)], dim=1)
        # [num_kv_heads, group, rows, head_size] against [num_kv_heads, 1, context + nodes, head_size]
        grouped = query[q0 : q0 + rows].to(dtype).unflatten(1, (-1, group)).permute(1, 2, 0, 3)
        scores = grouped @ key.unsqueeze(1).transpose(2, 3) * scale
        visible = torch.cat([tree.mask.new_ones(rows, context), tree.mask[r, :rows, :nodes]], dim=1)
        weights = _softmax(scores, visible, traits)
        result = (weights @ value.unsqueeze(1)).permute(2, 0, 1, 3).flatten(1, 2) * value_scale
        output[q0 : q0 + rows] = result.to(output.dtype)
    if kept is not None:
        kept[0], kept[-1] = tree_key, tree_key if kv_layout == LATENT_LAYOUT else tree_value


def _softmax(scores: torch.Tensor, visible: torch.Tensor, traits: AttentionTraits) -> torch.Tensor:
    """Turn scores ``[num_kv_heads, group, rows, keys]`` into weights; ``visible`` is bool ``[rows, keys]``."""
    distance = visible.flip(1).cumsum(1).flip(1) - 1  # of visible keys
    if traits.soft_cap:
        scores = traits.soft_cap * (scores / traits.soft_cap).tanh()
    if traits.alibi_slopes is not None:
        slopes = traits.alibi_slopes.to(scores.dtype).view(*scores.shape[:2], 1, 1)
        scores = scores - slopes * distance
    if traits.window:
        visible = visible & (distance < traits.window)
    if traits.local:
        own = visible.sum(dim=1, keepdim=True) - 1  # positions of the rows, and of their visible keys
        visible = visible & (distance <= own % traits.local)
    scores = scores.masked_fill(~visible, float("-inf"))
    if traits.sinks is not None:
        sinks = traits.sinks.to(scores.dtype).view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=3)
    weights = scores.softmax(dim=3)[..., : visible.shape[1]]
    return weights.where(visible.any(dim=1, keepdim=True), 0)  # a row without visible keys: NaN


def write_rows_reference(
    kept: torch.Tensor, kv_caches: Sequence[torch.Tensor], kv_layout: str, rows: torch.Tensor, slots: torch.Tensor
) -> None:
    """Do ``write_rows`` in plain torch: each page is unpacked and packed again."""
    for tensors, kv_cache in zip(kept, kv_caches, strict=True):
        if kv_layout == LATENT_LAYOUT:
            kv_cache[slots // kv_cache.shape[2], 0, slots % kv_cache.shape[2]] = tensors[0, rows, 0]
            continue
        key, value = tensors
        block_size = kv_cache.shape[2]
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            block, offset = divmod(slot, block_size)
            page = [t.clone() for t in unpack_pages(kv_cache[block : block + 1], kv_layout)]
            page[0][:, offset], page[1][:, offset] = key[row], value[row]
            kv_cache[block] = pack_pages(page[0][None], page[1][None], kv_layout)[0]


def unpack_pages(
    pages: torch.Tensor, kv_layout: str, value_size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Extract keys and values from ``[num_pages, num_kv_heads, block_size, 2 * head_size]`` pages, or from latents.

    Returns:
        Two ``[num_kv_heads, num_pages * block_size, head_size]`` tensors; values of latents have ``value_size``.
    """
    if kv_layout == LATENT_LAYOUT:
        latents = pages.transpose(0, 1).flatten(1, 2)
        return latents, latents[..., :value_size]
    num_pages, num_kv_heads, block_size, width = pages.shape
    head_size = width // 2
    if kv_layout == TOKEN_LAYOUT:
        key, value = pages.transpose(0, 1).flatten(1, 2).split(head_size, dim=-1)
        return key, value
    key, value = pages.reshape(num_pages, num_kv_heads, 2, block_size, head_size).unbind(2)
    shape = (num_pages, num_kv_heads)
    if _number_of(kv_layout) == KV_LAYOUTS["amx"]:
        key = key.reshape(*shape, block_size // 16, head_size // 2, 16, 2).permute(1, 0, 2, 4, 3, 5)
        value = value.reshape(*shape, head_size // 16, block_size // 2, 16, 2).permute(1, 0, 3, 5, 2, 4)
    else:
        key = key.reshape(*shape, head_size, block_size).permute(1, 0, 3, 2)
        value = value.transpose(0, 1)
    out_shape = (num_kv_heads, num_pages * block_size, head_size)
    return key.reshape(out_shape), value.reshape(out_shape)


def pack_pages(key: torch.Tensor, value: torch.Tensor, kv_layout: str) -> torch.Tensor:
    """Pack one page per leading index: the inverse of ``unpack_pages``; latents are packed from the keys.

    Args:
        key: ``[num_pages, num_kv_heads, block_size, head_size]``.
        value: as ``key``.
    """
    shape, (block_size, head_size) = key.shape[:2], key.shape[2:]
    if kv_layout == LATENT_LAYOUT:
        return key
    if kv_layout == TOKEN_LAYOUT:
        return torch.cat([key, value], dim=-1)
    if _number_of(kv_layout) == KV_LAYOUTS["amx"]:
        key = key.reshape(*shape, block_size // 16, 16, head_size // 2, 2).transpose(3, 4)
        value = value.reshape(*shape, block_size // 2, 2, head_size // 16, 16).permute(0, 1, 4, 2, 5, 3)
    else:
        key = key.transpose(2, 3)
    packed = torch.cat([key.reshape(*shape, -1), value.reshape(*shape, -1)], dim=-1)
    return packed.view(*shape, block_size, 2 * head_size)
