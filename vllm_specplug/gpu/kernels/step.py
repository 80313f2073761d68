"""The small kernels of a step without CPU-GPU synchronisation: store trees, stage rows, walk, plan, move key/value.

Each replaces many launches of the named torch functions by one; these functions are its reference in the tests:

================= =========================================================================
``store_trees``   ``tree.depths_from_parents``, ``layout.ancestor_mask``, ``ancestor_bits``
``stage_rows``    ``layout.lay_out``
``walk_rows``     ``walk_tokens`` of ``tests/doubles/reference_step``
``plan_step``     ``core.step.plan_step``
``move_rows``     ``move_rows`` of ``tests/doubles/reference_step``
================= =========================================================================

No value is read back and no shape depends on device data, so a CUDA graph can capture the launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_specplug.core.step import StepPlan
from vllm_specplug.types import PADDING, Walk

_PADDING = tl.constexpr(PADDING)
#: Rows that ``move_rows`` moves at once.
_MOVES = tl.constexpr(8)


@triton.jit
def _store_trees_kernel(
    tree_parents_ptr,
    slots_ptr,
    parents_ptr,
    depths_ptr,
    bits_ptr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
):
    request = tl.program_id(0)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    if slot < 0:
        return
    rows = tl.arange(0, WIDTH_PADDED)
    inside = rows < WIDTH
    tree = tree_parents_ptr + request * WIDTH
    parent = tl.load(tree + rows, mask=inside, other=_PADDING)
    for word in range(NUM_WORDS):
        # Go from every row up to the root, all rows at once.
        here = rows
        on = inside
        bits = tl.zeros([WIDTH_PADDED], tl.int64)
        depth = tl.zeros([WIDTH_PADDED], tl.int64)
        one = tl.full([WIDTH_PADDED], 1, tl.int64)
        for _ in range(MAX_DEPTH + 1):
            bits = tl.where(on & (here // 64 == word), bits | (one << (here % 64).to(tl.int64)), bits)
            above = tl.load(tree + here, mask=on & (here > 0), other=_PADDING)
            on = on & (here > 0) & (above >= 0) & (above < here)
            depth += on.to(tl.int64)
            here = tl.where(on, above.to(tl.int32), here)
        # A row whose parents do not lead to the root (padding, an invalid parent, too deep) becomes padding.
        is_node = inside & (here == 0) & (depth <= MAX_DEPTH)
        tl.store(bits_ptr + (slot * WIDTH + rows) * NUM_WORDS + word, tl.where(is_node, bits, 0), mask=inside)
        if word == 0:
            tl.store(depths_ptr + slot * WIDTH + rows, tl.where(is_node, depth, 0), mask=inside)
            tl.store(parents_ptr + slot * WIDTH + rows, tl.where(is_node & (rows > 0), parent, _PADDING), mask=inside)


def store_trees(
    tree_parents: torch.Tensor,
    slots: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    bits: torch.Tensor,
    max_depth: int,
) -> None:
    """Store the parents, depths and ancestor bits of trees in the slots of their requests.

    Invalid trees become valid: rows whose parents do not lead to the root in ``max_depth`` steps become padding.

    Args:
        tree_parents: int64 ``[num_reqs, num_rows]``, contiguous; ``TokenTree.parents``, or any numbers.
        slots: int ``[num_reqs]``; target slot of each tree; -1: do not store it.
        parents, depths: int64 ``[num_slots, num_rows]``, contiguous; written.
        bits: int64 ``[num_slots, num_rows, num_words]``, contiguous; written.
        max_depth: upper bound of the trees' depths.
    """
    num_reqs, width = tree_parents.shape
    _store_trees_kernel[(num_reqs,)](
        tree_parents,
        slots,
        parents,
        depths,
        bits,
        WIDTH=width,
        WIDTH_PADDED=triton.next_power_of_2(width),
        NUM_WORDS=bits.shape[2],
        MAX_DEPTH=max_depth,
        num_warps=1,
    )


# Compiled once for all numbers of requests, else a new one would be compiled while serving.
@triton.jit(do_not_specialize=("num_reqs",))
def _stage_rows_kernel(
    slots_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    row_offsets_ptr,
    depths_ptr,
    slot_bits_ptr,
    positions_ptr,
    context_lens_ptr,
    tree_start_ptr,
    tree_lens_ptr,
    bits_ptr,
    num_reqs,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    NUM_WORDS: tl.constexpr,
):
    request = tl.program_id(0)
    if request >= num_reqs:  # padding of a CUDA graph
        tl.store(tree_lens_ptr + request, 0)
        tl.store(context_lens_ptr + request, 0)
        return
    slot = tl.load(slots_ptr + request).to(tl.int64)
    num_rows = tl.load(row_offsets_ptr + request + 1) - tl.load(row_offsets_ptr + request)
    start = tl.load(query_start_loc_ptr + request + 1) - num_rows
    context = tl.load(seq_lens_ptr + request) - num_rows
    tl.store(context_lens_ptr + request, tl.where(num_rows > 1, context, 0))
    tl.store(tree_start_ptr + request, start)
    tl.store(tree_lens_ptr + request, tl.where(num_rows > 1, num_rows, 0))
    if num_rows > 1:
        rows = tl.arange(0, WIDTH_PADDED)
        inside = rows < num_rows
        depth = tl.load(depths_ptr + slot * WIDTH + rows, mask=inside, other=0)
        tl.store(positions_ptr + start + rows, context + depth, mask=inside)
        for word in range(NUM_WORDS):
            bits = tl.load(slot_bits_ptr + (slot * WIDTH + rows) * NUM_WORDS + word, mask=inside, other=0)
            tl.store(bits_ptr + (request * WIDTH + rows) * NUM_WORDS + word, bits, mask=inside)


def stage_rows(
    slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    row_offsets: torch.Tensor,
    depths: torch.Tensor,
    slot_bits: torch.Tensor,
    positions: torch.Tensor,
    context_lens: torch.Tensor,
    tree_start: torch.Tensor,
    tree_lens: torch.Tensor,
    bits: torch.Tensor,
    num_reqs_padded: int,
) -> None:
    """Lay the stored trees out over the rows of a forward; a request with one row has no tree.

    Args:
        slots: int ``[num_reqs]``.
        query_start_loc: int32 ``[>= num_reqs + 1]``; first row of each request in the forward; its tree is last.
        seq_lens: int32 ``[num_reqs]``; tokens up to the last row, by flat position.
        row_offsets: int32 ``[num_reqs + 1]``; prefix sums of the trees' rows, roots included.
        depths, slot_bits: as ``store_trees`` wrote them.
        positions: int64 ``[num_tokens]``; those of tree rows become context + depth.
        context_lens, tree_start, tree_lens: int32 ``[>= num_reqs_padded]``; written; context length 0 without a tree.
        bits: int64 ``[>= num_reqs_padded, num_rows, num_words]``, contiguous; written.
        num_reqs_padded: requests of the forward, including the padding of a CUDA graph.
    """
    width = depths.shape[1]
    _stage_rows_kernel[(num_reqs_padded,)](
        slots,
        query_start_loc,
        seq_lens,
        row_offsets,
        depths,
        slot_bits,
        positions,
        context_lens,
        tree_start,
        tree_lens,
        bits,
        slots.shape[0],
        WIDTH=width,
        WIDTH_PADDED=triton.next_power_of_2(width),
        NUM_WORDS=bits.shape[2],
        num_warps=1,
    )


@triton.jit
def _walk_rows_kernel(
    slots_ptr,
    row_offsets_ptr,
    tokens_ptr,
    sampled_ptr,
    parents_ptr,
    output_ptr,
    path_ptr,
    num_emitted_ptr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
):
    request = tl.program_id(0)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    first = tl.load(row_offsets_ptr + request)
    num_rows = tl.load(row_offsets_ptr + request + 1) - first
    rows = tl.arange(0, WIDTH_PADDED)
    inside = rows < num_rows
    tokens = tl.load(tokens_ptr + first + rows, mask=inside, other=_PADDING)
    # A node may hold PADDING for a token (placeholder drafts): it matches nothing.
    parents = tl.load(parents_ptr + slot * WIDTH + rows, mask=inside & (tokens >= 0), other=_PADDING)
    row = 0
    emitted = 0
    while row >= 0:
        token = tl.load(sampled_ptr + first + row)
        tl.store(output_ptr + request * WIDTH + emitted, token)
        tl.store(path_ptr + request * WIDTH + emitted, row)
        emitted += 1
        child = tl.where((parents == row) & (tokens == token), rows, WIDTH_PADDED)
        nearest = tl.min(child, axis=0)  # the first, where siblings repeat a token
        row = tl.where(nearest < WIDTH_PADDED, nearest, -1)
    tl.store(num_emitted_ptr + request, emitted)


def walk_rows(
    slots: torch.Tensor, row_offsets: torch.Tensor, tokens: torch.Tensor, sampled: torch.Tensor, parents: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walk the kept trees where a token was sampled at every row.

    Args:
        slots: int ``[num_reqs]``.
        row_offsets: int32 ``[num_reqs + 1]``; first row of each tree among the sampled rows.
        tokens: int ``[num_sampled_rows]``; the rows' own tokens; negative ones match nothing.
        sampled: int64 ``[num_sampled_rows]``; tokens sampled from the rows' logits.
        parents: int64 ``[num_slots, num_rows]``; as ``store_trees`` wrote them.

    Returns:
        ``Walk.output_token_ids`` (int64 here) and ``Walk.path_rows``, ``[num_reqs, num_rows]`` padded with -1, and
        ``Walk.num_emitted`` as int32.
    """
    num_reqs, width = slots.shape[0], parents.shape[1]
    output = torch.full((num_reqs, width), PADDING, dtype=torch.int64, device=sampled.device)
    path = torch.full_like(output, PADDING)
    num_emitted = torch.empty(num_reqs, dtype=torch.int32, device=sampled.device)
    _walk_rows_kernel[(num_reqs,)](
        slots,
        row_offsets,
        tokens,
        sampled,
        parents,
        output,
        path,
        num_emitted,
        WIDTH=width,
        WIDTH_PADDED=triton.next_power_of_2(width),
        num_warps=1,
    )
    return output, path, num_emitted


@triton.jit(do_not_specialize=("num_reqs", "num_flat_rows"))
def _plan_step_kernel(
    path_ptr, num_emitted_ptr, row_start_ptr, num_reqs, num_flat_rows,
    sources_ptr, targets_ptr, path_index_ptr, last_rows_ptr,
    WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    first = tl.load(row_start_ptr + request).to(tl.int64)
    num_emitted = tl.load(num_emitted_ptr + request)
    depth = tl.arange(0, WIDTH_PADDED)
    inside = depth < WIDTH
    accepted = inside & ((depth == 0) | (depth < num_emitted))
    source = first + tl.load(path_ptr + request * WIDTH + depth, mask=accepted, other=0)
    target = first + depth
    tl.store(sources_ptr + request * WIDTH + depth, tl.where(accepted, source, _PADDING), mask=inside)
    tl.store(targets_ptr + request * WIDTH + depth, tl.where(accepted, target, _PADDING), mask=inside)
    tl.store(last_rows_ptr + request, tl.max(tl.where(accepted, source, _PADDING), axis=0))
    tl.store(path_index_ptr + target, source, mask=accepted)
    # The other rows up to the next request's tree are their own: no program writes a row of another one.
    begin = tl.where(request == 0, 0, first)
    end = num_flat_rows.to(tl.int64)
    if request + 1 < num_reqs:
        end = tl.load(row_start_ptr + request + 1).to(tl.int64)
    num_accepted = tl.maximum(num_emitted, 1)
    for start in range(begin, end, BLOCK):
        row = start + tl.arange(0, BLOCK)
        own = (row < end) & ((row < first) | (row >= first + num_accepted))
        tl.store(path_index_ptr + row, row, mask=own)


def plan_step(walk: Walk, row_start: torch.Tensor, num_flat_rows: int) -> StepPlan:
    """Turn a walk into everything that follows from it, in one launch.

    Args:
        walk: of at least one request; its path rows are contiguous.
        row_start: int ``[num_reqs]``, rising; flat row of each root.
        num_flat_rows: of the forward.
    """
    num_reqs, width = walk.path_rows.shape
    sources, targets = torch.empty_like(walk.path_rows), torch.empty_like(walk.path_rows)
    path_index = torch.empty(num_flat_rows, dtype=torch.int64, device=sources.device)
    last_rows = path_index.new_empty(num_reqs)
    _plan_step_kernel[(num_reqs,)](
        walk.path_rows, walk.num_emitted, row_start, num_reqs, num_flat_rows, sources, targets, path_index, last_rows,
        WIDTH=width, WIDTH_PADDED=triton.next_power_of_2(width), BLOCK=256,
    )  # fmt: skip
    return StepPlan(sources, targets, path_index, last_rows)


@triton.jit
def _move_rows_kernel(
    caches_ptr,
    block_stride,
    head_stride,
    slot_stride,
    slot_mapping_ptr,
    source_rows_ptr,
    target_rows_ptr,
    like_ptr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    CONTENT: tl.constexpr,
    CONTENT_PADDED: tl.constexpr,
):
    request = tl.program_id(0)
    head = tl.program_id(1)
    cache = tl.cast(tl.load(caches_ptr + tl.program_id(2)), tl.pointer_type(like_ptr.dtype.element_ty))
    cache = tl.multiple_of(cache, 16)  # bytes; else elements are loaded one by one
    content = tl.arange(0, CONTENT_PADDED)
    # In path order: a source is never a row that an earlier move has written (see core/kv.py).  So several moves are
    # made at once, all reads before all writes.  The root stays.
    first = 1
    last_source = tl.load(source_rows_ptr + request * WIDTH)
    while (first < WIDTH) & (last_source >= 0):
        depth = first + tl.arange(0, _MOVES)
        source_row = tl.load(source_rows_ptr + request * WIDTH + depth, mask=depth < WIDTH, other=_PADDING)
        target_row = tl.load(target_rows_ptr + request * WIDTH + depth, mask=depth < WIDTH, other=_PADDING)
        moved = (source_row >= 0) & (source_row != target_row)
        source = tl.load(slot_mapping_ptr + source_row, mask=moved, other=0)
        target = tl.load(slot_mapping_ptr + target_row, mask=moved, other=0)
        read = cache + (source // PAGE) * block_stride + head * head_stride + (source % PAGE) * slot_stride
        write = cache + (target // PAGE) * block_stride + head * head_stride + (target % PAGE) * slot_stride
        inside = moved[:, None] & (content < CONTENT)[None, :]
        rows = tl.load(read[:, None] + content[None, :], mask=inside)
        tl.debug_barrier()
        tl.store(write[:, None] + content[None, :], rows, mask=inside)
        last_source = tl.min(source_row, axis=0)
        first += _MOVES


def cache_pointers(caches: list[torch.Tensor]) -> torch.Tensor:
    """Return the addresses of the layers' caches, each once (layers may share one), for ``move_rows``.

    Raises:
        ValueError: the caches differ in shape, strides or dtype, or an address is no multiple of 16.
    """
    first = caches[0]
    for cache in caches:
        if (cache.shape, cache.stride(), cache.dtype) != (first.shape, first.stride(), first.dtype):
            raise ValueError(f"the layers' caches differ: {cache.shape} {cache.dtype}, {first.shape} {first.dtype}")
    addresses = dict.fromkeys(cache.data_ptr() for cache in caches)
    if any(address % 16 for address in addresses):
        raise ValueError("a cache begins at an address that is no multiple of 16 bytes")
    return torch.tensor(list(addresses), dtype=torch.uint64, device=first.device)


def move_rows(
    pointers: torch.Tensor,
    like: torch.Tensor,
    slot_mapping: torch.Tensor,
    source_rows: torch.Tensor,
    target_rows: torch.Tensor,
) -> None:
    """Move the accepted rows' key/value after the context, in all layers.

    Args:
        pointers: uint64 ``[num_caches]``, from ``cache_pointers``.
        like: one of the caches, ``[num_blocks, num_kv_heads, block_size, content]``, contiguous in the last.
        slot_mapping: int64 ``[num_tokens]``; slot of each row of the forward.
        source_rows, target_rows: int64 ``[num_reqs, max_emitted]``, contiguous; see ``core.step.StepPlan``.
    """
    _, num_kv_heads, page, content = like.shape
    _move_rows_kernel[(source_rows.shape[0], num_kv_heads, pointers.shape[0])](
        pointers, like.stride(0), like.stride(1), like.stride(2), slot_mapping, source_rows, target_rows, like,
        WIDTH=source_rows.shape[1], PAGE=page, CONTENT=content, CONTENT_PADDED=triton.next_power_of_2(content),
        num_warps=4,
    )  # fmt: skip
