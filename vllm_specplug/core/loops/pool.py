"""Compiled loops over a draft pool: choosing the best nodes, growing a level (``growth``), reranking (``pruning``).

All of them are in one file: numba's cache notices a change only in the file of the function that it compiled.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, from_numpy

from vllm_specplug.core.loops.arrays import as_array
from vllm_specplug.core.pool import Beam, DraftPool
from vllm_specplug.types import PADDING, Draft, TokenTree
from vllm_specplug.utils.compiled import compiled

NEVER = np.float32(-np.inf)
#: The lowest finite value: only -inf is below it.
LOWEST = float(np.finfo(np.float32).min)
#: Number of values that ``_largest`` compares at once.
BLOCK = 64


@compiled
def _threshold(values, count, keys):
    """Find the ``count``-th best value, and how many of exactly that value are among the best ``count``.

    Args:
        values: float32 ``[n]``, ``n > count > 0``; NaN counts as the largest, as in torch.
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
    for i in range(target):  # all better values are before the target
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
        ranks: int64, at least ``[n]``; overwritten with the number of chosen values up to and including each one.
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
    best, indices = np.empty((num_rows, count), np.float32), np.empty((num_rows, count), np.int64)
    keys = np.empty(count, np.float32)
    for row in range(num_rows):
        filled, last = 0, NEVER
        for start in range(0, width, BLOCK):
            block = values[row, start : start + BLOCK]
            hits = np.int32(0)  # mostly stays 0; in this form the comparisons become vector instructions
            for i in range(len(block)):
                hits += np.int32(not (block[i] <= last))
            if hits == 0 and filled == count:
                continue
            for i in range(len(block)):
                key = np.float32(np.inf) if np.isnan(block[i]) else block[i]
                if filled < count or key > last:
                    filled = min(filled + 1, count)
                    slot = filled - 1
                    while slot > 0 and keys[slot - 1] < key:
                        keys[slot], indices[row, slot] = keys[slot - 1], indices[row, slot - 1]
                        slot -= 1
                    keys[slot], indices[row, slot] = key, start + i
                    last = keys[filled - 1]
        for slot in range(count):
            best[row, slot] = values[row, indices[row, slot]]
    return best, indices


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Compute ``values.topk(count)`` of float32 ``[num_rows, width]``, ``width >= count``; ties to the lower index."""
    best, indices = _largest(as_array(values, np.float32), count)
    return from_numpy(best), from_numpy(indices)


@compiled
def _rerank(token_ids, parents, log_values, depths, size, root_token_ids, num_nodes, floor):
    num_reqs, width = len(root_token_ids), num_nodes + 1
    out_token_ids = np.full((num_reqs, width), PADDING, np.int64)
    out_parents = np.full((num_reqs, width), PADDING, np.int64)
    out_depths = np.zeros((num_reqs, width), np.int64)
    out_values = np.full((num_reqs, width), NEVER, np.float32)
    pool_indices = np.full((num_reqs, width), PADDING, np.int64)
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
                pool_indices[request, row] = node
        num_rows[request] = row + 1
    return out_token_ids, out_parents, out_depths, num_rows, out_values, pool_indices


def rerank(
    pool: DraftPool, root_token_ids: Tensor, num_nodes: int, min_node_value: float
) -> tuple[Draft, Tensor] | None:
    """``pruning.rerank_draft`` as a loop; None for other dtypes or shapes."""
    if pool.log_values.dtype is not torch.float32 or len(root_token_ids) != len(pool.token_ids):
        return None
    *tree, log_values, pool_indices = _rerank(
        as_array(pool.token_ids, np.int64),
        as_array(pool.parents, np.int64),
        as_array(pool.log_values, np.float32),
        as_array(pool.depths, np.int64),
        pool.size,
        as_array(root_token_ids, np.int64),
        num_nodes,
        math.log(min_node_value) if min_node_value > 0 else LOWEST,
    )
    return Draft(TokenTree(*map(from_numpy, tree)), from_numpy(log_values)), from_numpy(pool_indices)


@compiled
def _append_level(token_ids, parents, log_values, depths, start, level, beam, new_token_ids, log_probs):
    """``growth.expand`` as a loop; ``beam`` of shape ``[num_reqs, 0]`` means the root."""
    num_reqs, top_k = len(token_ids), new_token_ids.shape[1]
    num_fed = len(new_token_ids) // num_reqs
    for request in range(num_reqs):
        node = start
        for i in range(num_fed):
            parent, above = PADDING, np.float32(0.0)
            if beam.shape[1]:
                parent = beam[request, i]
                above = log_values[request, parent]
            for child in range(top_k):
                value = log_probs[request * num_fed + i, child]
                if np.isnan(value):
                    value = NEVER
                token_ids[request, node] = new_token_ids[request * num_fed + i, child]
                parents[request, node] = parent
                log_values[request, node] = above + min(value, np.float32(0.0))
                depths[request, node] = level
                node += 1


@compiled
def _deeper_nodes_can_enter(log_values, level_start, size, num_nodes):
    """Whether ``growth.deeper_nodes_can_enter`` holds for any request."""
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
    """``growth.next_beam`` as a loop; returns the fields of ``Beam``."""
    num_reqs, width = len(token_ids), min(top_k, size - level_start)
    num_fed, before = ancestors.shape[1], ancestors.shape[2]
    beam = np.empty((num_reqs, width), np.int64)
    beam_token_ids = np.empty((num_reqs, width), np.int64)
    beam_values = np.empty((num_reqs, width), np.float32)
    sources = np.empty(num_reqs * width, np.int64)
    mask = np.zeros((num_reqs, width, before + width), np.bool_)
    keys, ranks = np.empty(size - level_start, np.float32), np.empty(size - level_start, np.int64)
    for request in range(num_reqs):
        _rank_best(log_values[request, level_start:size], width, NEVER, keys, ranks)
        slot = 0
        for i in range(size - level_start):
            if ranks[i] > slot:
                node, parent = level_start + i, i // top_k
                beam[request, slot] = node
                beam_token_ids[request, slot] = token_ids[request, node]
                beam_values[request, slot] = log_values[request, node]
                sources[request * width + slot] = request * max(num_fed, 1) + parent
                if num_fed:
                    for fed in range(before):  # not as slices: numba would compile their error's text too
                        mask[request, slot, fed] = ancestors[request, parent, fed]
                mask[request, slot, before + slot] = True
                slot += 1
    return beam, beam_token_ids, beam_values, sources, mask


@compiled
def _grow(arrays, start, level, beam, ancestors, new_token_ids, log_probs, num_nodes):
    token_ids, parents, log_values, depths = arrays
    _append_level(token_ids, parents, log_values, depths, start, level, beam, new_token_ids, log_probs)
    size, top_k = start + len(new_token_ids) // len(token_ids) * new_token_ids.shape[1], new_token_ids.shape[1]
    grows = size < token_ids.shape[1] and _deeper_nodes_can_enter(log_values, start, size, num_nodes)
    return grows, _next_level(token_ids, log_values, start, size, top_k if grows else 0, ancestors)


def grow_level(pool: DraftPool, beam: Beam | None, token_ids: Tensor, log_probs: Tensor, num_nodes: int) -> Beam | None:
    """``growth.grow_level`` as a loop."""
    num_reqs = len(pool.token_ids)
    grows, arrays = _grow(
        tuple([tensor.numpy() for tensor in (pool.token_ids, pool.parents, pool.log_values, pool.depths)]),
        pool.size,
        pool.num_levels + 1,
        np.empty((num_reqs, 0), np.int64) if beam is None else as_array(beam.nodes, np.int64),
        np.empty((num_reqs, 0, 0), np.bool_) if beam is None else as_array(beam.mask, np.bool_),
        as_array(token_ids, np.int64),
        as_array(log_probs.float(), np.float32),
        num_nodes,
    )
    pool.num_levels += 1
    pool.level_start, pool.size = pool.size, pool.size + token_ids.numel() // num_reqs
    return Beam(*map(from_numpy, arrays)) if grows else None
