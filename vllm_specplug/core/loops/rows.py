"""Compiled loops over the rows of trees, for ``tree``, ``pruning.prune``, ``layout`` and ``step``."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, from_numpy

from vllm_specplug.core.loops.arrays import as_array
from vllm_specplug.types import PADDING, Draft, TokenTree, TreeLayout, Walk
from vllm_specplug.utils.compiled import compiled

NEVER = np.float32(-np.inf)


@compiled
def _fill_depths(parents, depths):
    """Fill in the depths of one tree's rows; false if a parent's row is not above its child's."""
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
    """``tree.depths_from_parents`` as a loop; None if a parent's row is not above its child's."""
    valid, depths = _depths_from_parents(as_array(parents, np.int64))
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


def from_flat(token_ids: Tensor, parents: Tensor, num_rows: Tensor) -> TokenTree | None:
    """``tree.from_flat`` as a loop; None if a parent's row is not above its child's, or for other shapes."""
    if token_ids.shape != parents.shape or len(num_rows) != len(parents):
        return None
    valid, *arrays = _from_flat(*[as_array(values, np.int64) for values in (token_ids, parents, num_rows)])
    return TokenTree(*map(from_numpy, arrays), num_rows.long()) if valid else None


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
    new_rows, valid = np.empty(width, np.int64), True
    for request in range(num_reqs):
        target = 0
        for row in range(max(min(num_rows[request], width), 1)):
            if row == 0 or keep[request, row]:
                new_rows[row] = target
                parent = parents[request, row]
                valid &= parent < row
                parent = min(parent, row)
                out_token_ids[request, target] = token_ids[request, row]
                out_parents[request, target] = new_rows[parent] if parent >= 0 else PADDING
                out_depths[request, target] = depths[request, row]
                out_values[request, target] = log_values[request, row]
                if bits.shape[1]:
                    out_bits[request, target] = bits[request, row]
                target += 1
            else:
                new_rows[row] = target - 1
    return valid, out_token_ids, out_parents, out_depths, out_num_rows, out_values, out_bits


def prune(draft: Draft, keep: Tensor) -> Draft | None:
    """``pruning.prune`` as a loop; None if a parent's row is not above its child's, or for other dtypes or shapes."""
    if draft.log_values.dtype is not torch.float32 or keep.shape != draft.tree.parents.shape:
        return None
    tree, bits = draft.tree, draft.source_bits
    valid, *arrays = _prune(
        as_array(tree.token_ids, np.int64),
        as_array(tree.parents, np.int64),
        as_array(tree.depths, np.int64),
        as_array(tree.num_rows, np.int64),
        as_array(draft.log_values, np.float32),
        np.empty((len(keep), 0), np.int64) if bits is None else as_array(bits, np.int64),
        as_array(keep, np.bool_),
    )
    if not valid:
        return None
    *rows, log_values, new_bits = map(from_numpy, arrays)
    return Draft(TokenTree(*rows), log_values, draft.source_names, None if bits is None else new_bits)


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
            for ancestor in range(parent + 1):  # not as slices, see `pool._next_level`
                mask[request, row, ancestor] = mask[request, parent, ancestor]
            mask[request, row, row] = True
    return True, positions, mask


def lay_out(tree: TokenTree, context_lens: Tensor) -> TreeLayout | None:
    """``layout.lay_out`` as a loop; None if a parent's row is not above its child's, or for other shapes."""
    if len(context_lens) != len(tree.parents):
        return None
    valid, positions, mask = _lay_out(
        as_array(tree.parents, np.int64),
        as_array(tree.depths, np.int64),
        as_array(tree.num_rows, np.int64),
        as_array(context_lens, np.int64),
    )
    return TreeLayout(from_numpy(positions), from_numpy(mask)) if valid else None


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
    """``step.plan_step`` as a loop; returns the fields of ``StepPlan``."""
    rows = [as_array(values, np.int64) for values in (walk.path_rows, walk.num_emitted, row_start)]
    return tuple(map(from_numpy, _plan_step(*rows, num_flat_rows)))
