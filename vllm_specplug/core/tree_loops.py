"""The tree work of a round on a CPU: ``tree``, ``layout`` and ``kv`` in compiled loops over the tensors' memory.

Those modules say what is computed, in torch operations that suit any device.  Where ``is_cpu_without_autograd`` holds they
call the functions here, and get the same results.  A function that returns None leaves the work to the torch operations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, from_numpy

from vllm_specplug.types import PADDING, Draft, TokenTree, Walk
from vllm_specplug.utils.compiled import compiled

if TYPE_CHECKING:
    from vllm_specplug.core.tree import Beam, DraftPool

NEVER = np.float32(-np.inf)
#: Below it lies nothing but -inf.
LOWEST = float(np.finfo(np.float32).min)
#: Values compared at once where few are wanted.
BLOCK = 64

_use_loops = True


@contextmanager
def torch_operations() -> Iterator[None]:
    """Use the torch operations inside, as on other devices."""
    global _use_loops
    before, _use_loops = _use_loops, False
    try:
        yield
    finally:
        _use_loops = before


def is_cpu_without_autograd(*tensors: Tensor) -> bool:
    """Whether the loops may read these tensors: all lie in the host's memory, and nothing traces the operations."""
    if not _use_loops or torch.compiler.is_compiling():
        return False
    return all([tensor.is_cpu and not tensor.requires_grad for tensor in tensors])


def _array(tensor: Tensor, dtype: type) -> np.ndarray:
    """The tensor's memory, or a copy where it has gaps or another type: one compiled form of each loop is enough."""
    return np.ascontiguousarray(tensor.numpy(), dtype)


# ---- the best nodes


@compiled
def _threshold(values, count, keys):
    """The ``count``-th best value, and how many of exactly that value are among the best ``count``.

    Args:
        values: float32 ``[n]``, ``n > count > 0``; NaN is the best, as torch sorts.
        count: int.
        keys: float32, at least ``[n]``; overwritten.
    """
    for i in range(len(values)):
        keys[i] = np.float32(np.inf) if np.isnan(values[i]) else values[i]
    low, high, target = 0, len(values) - 1, count - 1
    while low < high:  # Hoare's selection
        pivot = keys[target]
        i, j = low, high
        while i <= j:
            while keys[i] > pivot:
                i += 1
            while keys[j] < pivot:
                j -= 1
            if i <= j:
                keys[i], keys[j] = keys[j], keys[i]
                i += 1
                j -= 1
        if j < target:
            low = i
        if target < i:
            high = j
    threshold, better = keys[target], 0
    for i in range(target):  # all better ones stand in front
        better += keys[i] > threshold
    return threshold, count - better


@compiled
def _rank_best(values, count, floor, keys, ranks):
    """Choose the best ``count`` values, ties to the lower index, without those below ``floor``.

    Args:
        values: float32 ``[n]``.
        count: int.
        floor: float32.
        keys: float32, at least ``[n]``; overwritten.
        ranks: int64, at least ``[n]``; becomes how many of the values up to each are chosen.
    """
    threshold, ties = NEVER, len(values)
    if 0 < count < len(values):
        threshold, ties = _threshold(values, count, keys)
    rank = 0
    for i in range(len(values)):
        key = np.float32(np.inf) if np.isnan(values[i]) else values[i]
        if key >= threshold and key >= floor and rank < count:
            if key > threshold:
                rank += 1
            elif ties > 0:
                ties -= 1
                rank += 1
        ranks[i] = rank


@compiled
def _largest(values, count):
    num_rows, width = values.shape
    best, places = np.empty((num_rows, count), np.float32), np.empty((num_rows, count), np.int64)
    keys = np.empty(count, np.float32)
    for row in range(num_rows):
        filled, last = 0, NEVER
        for start in range(0, width, BLOCK):
            block = values[row, start : start + BLOCK]
            hits = np.int32(0)  # Most blocks have none; in this form the comparisons become vector instructions.
            for i in range(len(block)):
                hits += np.int32(not (block[i] <= last))
            if hits == 0 and filled == count:
                continue
            for i in range(len(block)):
                key = np.float32(np.inf) if np.isnan(block[i]) else block[i]
                if filled < count or key > last:
                    filled = min(filled + 1, count)
                    place = filled - 1
                    while place > 0 and keys[place - 1] < key:
                        keys[place], places[row, place] = keys[place - 1], places[row, place - 1]
                        place -= 1
                    keys[place], places[row, place] = key, start + i
                    last = keys[filled - 1]
        for place in range(count):
            best[row, place] = values[row, places[row, place]]
    return best, places


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """``values.topk(count)`` of float32 ``[num_rows, width]``, ``width >= count``; ties to the lower index."""
    best, places = _largest(_array(values, np.float32), count)
    return from_numpy(best), from_numpy(places)


@compiled
def _rerank(token_ids, parents, log_values, depths, size, root_token_ids, num_nodes, floor):
    num_reqs, width = len(root_token_ids), num_nodes + 1
    out_token_ids = np.full((num_reqs, width), PADDING, np.int64)
    out_parents = np.full((num_reqs, width), PADDING, np.int64)
    out_depths = np.zeros((num_reqs, width), np.int64)
    out_values = np.full((num_reqs, width), NEVER, np.float32)
    places = np.full((num_reqs, width), PADDING, np.int64)
    num_rows = np.empty(num_reqs, np.int64)
    keys, ranks = np.empty(size, np.float32), np.empty(size, np.int64)
    for request in range(num_reqs):
        out_token_ids[request, 0] = root_token_ids[request]
        out_values[request, 0] = 0.0
        values = log_values[request, :size]
        _rank_best(values, num_nodes, np.float32(floor), keys, ranks)
        row = 0
        for node in range(size):
            if ranks[node] > row:
                row += 1
                parent = min(parents[request, node], size - 1)
                out_token_ids[request, row] = token_ids[request, node]
                out_parents[request, row] = ranks[parent] if parent >= 0 else 0
                out_depths[request, row] = depths[request, node]
                out_values[request, row] = values[node]
                places[request, row] = node
        num_rows[request] = row + 1
    return out_token_ids, out_parents, out_depths, num_rows, out_values, places


def rerank(pool: DraftPool, root_token_ids: Tensor, num_nodes: int, min_node_value: float) -> tuple[Tensor, ...] | None:
    """``tree.rerank_draft``: token ids, parents, depths, number of rows, log values and pool indices."""
    if pool.log_values.dtype is not torch.float32 or len(root_token_ids) != len(pool.token_ids):
        return None
    arrays = _rerank(
        _array(pool.token_ids, np.int64),
        _array(pool.parents, np.int64),
        _array(pool.log_values, np.float32),
        _array(pool.depths, np.int64),
        pool.size,
        _array(root_token_ids, np.int64),
        num_nodes,
        math.log(min_node_value) if min_node_value > 0 else LOWEST,
    )
    return tuple([from_numpy(array) for array in arrays])


# ---- growth


@compiled
def _append_level(token_ids, parents, log_values, depths, start, level, beam, new_token_ids, log_probs):
    """``tree.expand``; ``beam`` ``[num_reqs, 0]`` stands for the root."""
    num_reqs, top_k = len(token_ids), new_token_ids.shape[1]
    fed = len(new_token_ids) // num_reqs
    for request in range(num_reqs):
        node = start
        for place in range(fed):
            parent, above = PADDING, np.float32(0.0)
            if beam.shape[1]:
                parent = beam[request, place]
                above = log_values[request, parent]
            for child in range(top_k):
                value = log_probs[request * fed + place, child]
                if np.isnan(value):
                    value = NEVER
                token_ids[request, node] = new_token_ids[request * fed + place, child]
                parents[request, node] = parent
                log_values[request, node] = above + min(value, np.float32(0.0))
                depths[request, node] = level
                node += 1


@compiled
def _can_pay(log_values, level_start, size, num_nodes):
    """Whether ``tree.growth_can_pay`` of any request."""
    for request in range(len(log_values)):
        bound = NEVER
        for node in range(level_start, size):
            bound = max(bound, log_values[request, node])
        as_good = 0
        if size >= num_nodes:
            for node in range(size):
                as_good += log_values[request, node] >= bound
        if bound > NEVER and (size < num_nodes or as_good < num_nodes):
            return True
    return False


@compiled
def _next_level(token_ids, log_values, level_start, size, top_k, ancestors):
    """``tree.next_beam`` and what the drafter is told of it, see ``tree.Beam``."""
    num_reqs, width = len(token_ids), min(top_k, size - level_start)
    fed, before = ancestors.shape[1], ancestors.shape[2]
    beam = np.empty((num_reqs, width), np.int64)
    beam_token_ids = np.empty((num_reqs, width), np.int64)
    beam_values = np.empty((num_reqs, width), np.float32)
    sources = np.empty(num_reqs * width, np.int64)
    mask = np.zeros((num_reqs, width, before + width), np.bool_)
    keys, ranks = np.empty(size - level_start, np.float32), np.empty(size - level_start, np.int64)
    for request in range(num_reqs):
        _rank_best(log_values[request, level_start:size], width, NEVER, keys, ranks)
        place = 0
        for i in range(size - level_start):
            if ranks[i] > place:
                node, parent = level_start + i, i // top_k
                beam[request, place] = node
                beam_token_ids[request, place] = token_ids[request, node]
                beam_values[request, place] = log_values[request, node]
                sources[request * width + place] = request * max(fed, 1) + parent
                if fed:
                    mask[request, place, :before] = ancestors[request, parent]
                mask[request, place, before + place] = True
                place += 1
    return beam, beam_token_ids, beam_values, sources, mask


@compiled
def _grow(token_ids, parents, log_values, depths, start, level, beam, ancestors, new_token_ids, log_probs, num_nodes):
    _append_level(token_ids, parents, log_values, depths, start, level, beam, new_token_ids, log_probs)
    size, top_k = start + len(new_token_ids) // len(token_ids) * new_token_ids.shape[1], new_token_ids.shape[1]
    grows = size < token_ids.shape[1] and _can_pay(log_values, start, size, num_nodes)
    return grows, _next_level(token_ids, log_values, start, size, top_k if grows else 0, ancestors)


def grow_level(
    pool: DraftPool, beam: Beam | None, token_ids: Tensor, log_probs: Tensor, num_nodes: int
) -> tuple[Tensor, ...] | None:
    """``tree.grow_level``: the fields of its result; None where the growth ends."""
    num_reqs = len(pool.token_ids)
    grows, arrays = _grow(
        pool.token_ids.numpy(),
        pool.parents.numpy(),
        pool.log_values.numpy(),
        pool.depths.numpy(),
        pool.size,
        pool.num_levels + 1,
        np.empty((num_reqs, 0), np.int64) if beam is None else _array(beam.nodes, np.int64),
        np.empty((num_reqs, 0, 0), np.bool_) if beam is None else _array(beam.mask, np.bool_),
        _array(token_ids, np.int64),
        _array(log_probs.float(), np.float32),
        num_nodes,
    )
    pool.num_levels += 1
    pool.level_start, pool.size = pool.size, pool.size + token_ids.numel() // num_reqs
    return tuple([from_numpy(array) for array in arrays]) if grows else None


# ---- trees as rows


@compiled
def _fill_depths(parents, depths):
    """Depths of one tree's rows; false where a parent does not stand above its child."""
    for row in range(len(parents)):
        parent = parents[row]
        if parent >= 0 and parent >= row:
            return False
        depths[row] = depths[parent] + 1 if parent >= 0 else 0
    return True


@compiled
def _depths_from_parents(parents):
    depths = np.empty_like(parents)
    for request in range(len(parents)):
        if not _fill_depths(parents[request], depths[request]):
            return False, depths
    return True, depths


def depths_from_parents(parents: Tensor) -> Tensor | None:
    """``tree.depths_from_parents``; None where a parent does not stand above its child."""
    valid, depths = _depths_from_parents(_array(parents, np.int64))
    return from_numpy(depths) if valid else None


@compiled
def _from_flat(token_ids, parents, num_rows):
    num_reqs, width = token_ids.shape
    out_token_ids = np.full((num_reqs, width), PADDING, np.int64)
    out_parents = np.full((num_reqs, width), PADDING, np.int64)
    depths = np.zeros((num_reqs, width), np.int64)
    for request in range(num_reqs):
        for row in range(min(num_rows[request], width)):
            out_token_ids[request, row] = token_ids[request, row]
            if row:
                out_parents[request, row] = parents[request, row]
        if not _fill_depths(out_parents[request], depths[request]):
            return False, out_token_ids, out_parents, depths
    return True, out_token_ids, out_parents, depths


def from_flat(token_ids: Tensor, parents: Tensor, num_rows: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """``tree.from_flat``: token ids, parents and depths; None where a parent does not stand above its child."""
    if token_ids.shape != parents.shape or len(num_rows) != len(parents):
        return None
    valid, *arrays = _from_flat(_array(token_ids, np.int64), _array(parents, np.int64), _array(num_rows, np.int64))
    return tuple([from_numpy(array) for array in arrays]) if valid else None


@compiled
def _prune(token_ids, parents, depths, num_rows, log_values, bits, keep):
    num_reqs, width = token_ids.shape
    out_num_rows, longest = np.ones(num_reqs, np.int64), 1
    for request in range(num_reqs):
        for row in range(1, min(num_rows[request], width)):
            out_num_rows[request] += keep[request, row]
        longest = max(longest, out_num_rows[request])
    out_token_ids = np.full((num_reqs, longest), PADDING, np.int64)
    out_parents = np.full((num_reqs, longest), PADDING, np.int64)
    out_depths = np.zeros((num_reqs, longest), np.int64)
    out_values = np.full((num_reqs, longest), NEVER, np.float32)
    out_bits = np.zeros((num_reqs, longest if bits.shape[1] else 0), np.int64)
    places, valid = np.empty(width, np.int64), True
    for request in range(num_reqs):
        target = 0
        for row in range(max(min(num_rows[request], width), 1)):
            if row == 0 or keep[request, row]:
                places[row] = target
                parent = parents[request, row]
                valid &= parent < row
                parent = min(parent, row)
                out_token_ids[request, target] = token_ids[request, row]
                out_parents[request, target] = places[parent] if parent >= 0 else PADDING
                out_depths[request, target] = depths[request, row]
                out_values[request, target] = log_values[request, row]
                if bits.shape[1]:
                    out_bits[request, target] = bits[request, row]
                target += 1
            else:
                places[row] = target - 1
    return valid, out_token_ids, out_parents, out_depths, out_num_rows, out_values, out_bits


def prune(draft: Draft, keep: Tensor) -> tuple[Tensor, ...] | None:
    """``tree.prune``: token ids, parents, depths, number of rows, log values and source bits.

    None where a parent does not stand above its child.
    """
    if draft.log_values.dtype is not torch.float32 or keep.shape != draft.tree.parents.shape:
        return None
    tree, bits = draft.tree, draft.source_bits
    valid, *arrays = _prune(
        _array(tree.token_ids, np.int64),
        _array(tree.parents, np.int64),
        _array(tree.depths, np.int64),
        _array(tree.num_rows, np.int64),
        _array(draft.log_values, np.float32),
        np.empty((len(keep), 0), np.int64) if bits is None else _array(bits, np.int64),
        _array(keep, np.bool_),
    )
    return tuple([from_numpy(array) for array in arrays]) if valid else None


# ---- layout and commit


@compiled
def _lay_out(parents, depths, num_rows, context_lens):
    num_reqs, width = parents.shape
    positions = np.empty((num_reqs, width), np.int64)
    mask = np.zeros((num_reqs, width, width), np.bool_)
    for request in range(num_reqs):
        for row in range(width):
            positions[request, row] = context_lens[request] + depths[request, row]
        for row in range(min(num_rows[request], width)):
            parent = max(parents[request, row], 0)
            if parent > max(row - 1, 0):
                return False, positions, mask
            mask[request, row, : parent + 1] = mask[request, parent, : parent + 1]
            mask[request, row, row] = True
    return True, positions, mask


def lay_out(tree: TokenTree, context_lens: Tensor) -> tuple[Tensor, Tensor] | None:
    """``layout.lay_out``: positions and mask; None where a parent does not stand above its child."""
    if len(context_lens) != len(tree.parents):
        return None
    valid, positions, mask = _lay_out(
        _array(tree.parents, np.int64),
        _array(tree.depths, np.int64),
        _array(tree.num_rows, np.int64),
        _array(context_lens, np.int64),
    )
    return (from_numpy(positions), from_numpy(mask)) if valid else None


@compiled
def _plan_step(path_rows, num_emitted, row_start, num_flat_rows):
    num_reqs, width = path_rows.shape
    sources, targets = np.full((num_reqs, width), PADDING, np.int64), np.full((num_reqs, width), PADDING, np.int64)
    path_index, last_rows = np.arange(num_flat_rows), np.empty(num_reqs, np.int64)
    for request in range(num_reqs):
        for depth in range(min(max(num_emitted[request], 1), width)):
            source, target = row_start[request] + path_rows[request, depth], row_start[request] + depth
            sources[request, depth], targets[request, depth] = source, target
            path_index[target] = last_rows[request] = source
    return sources, targets, path_index, last_rows


def plan_step(walk: Walk, row_start: Tensor, num_flat_rows: int) -> tuple[Tensor, ...]:
    """Return the fields of ``step.plan_step``."""
    arrays = _plan_step(
        _array(walk.path_rows, np.int64), _array(walk.num_emitted, np.int64), _array(row_start, np.int64), num_flat_rows
    )
    return tuple([from_numpy(array) for array in arrays])


def compile_loops() -> None:
    """Compile all loops, or load what was compiled: the first requests would wait for them."""
    from vllm_specplug.core.tree import new_pool

    zero, one = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    rows, value = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1)
    tree = TokenTree(rows, rows - 1, rows, one)
    pool = new_pool(1, 1, 1, "cpu")
    grow_level(pool, None, largest(value, 1)[1], value, 1)
    rerank(pool, zero, 1, 0.0)
    depths_from_parents(tree.parents)
    from_flat(rows, rows, one)
    prune(Draft(tree, value), rows == 0)
    lay_out(tree, zero)
    plan_step(Walk(rows.int(), rows, one), zero, 1)
