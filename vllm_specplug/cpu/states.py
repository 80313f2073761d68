"""Recurrent states in a step with trees: the state of a node continues its parent's.

The rows of one depth are so many plain decodes: each runs on a copy of its parent's state, by vLLM's own decode kernel,
so that a row has the bits of plain decoding.  Copies live in one layer, for two depths.  A request's own state stays as
it is in the forward.  The commit then decodes the accepted rows anew, on the request's own state: only the inputs of
the layer are kept per node, not states.  So a rejected row leaves nothing behind, and vLLM's state slots for draft
tokens are not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vllm_specplug.core.tree import depths_from_parents

#: ``core(metadata, inputs, output)`` computes a layer's convolution and recurrence for the rows of ``inputs``.
Core = Callable[[Any, Sequence[torch.Tensor], torch.Tensor], None]


@dataclass(frozen=True)
class StateLevel:
    """Tree rows of one depth.

    Attributes:
        rows: int64 ``[num_rows]``; in the flat batch.
        parents: int64 ``[num_rows]``; place of the parent's state: 1 + its row in the level before; 0 for roots.
    """

    rows: torch.Tensor
    parents: torch.Tensor


@dataclass(frozen=True)
class StateRows:
    """Rows of a forward, as layers with a state compute them.

    Attributes:
        requests: int64 ``[num_trees]``; requests with a tree, in batch order.
        contexts: int64 ``[num_trees]``; their cached tokens.
        rows: int64 ``[num_tree_rows]``; flat rows of all trees, ascending.
        levels: by depth.
        others: int64 ``[num_others]``; requests without a tree.
        other_lens: int64 ``[num_others]``; their rows, drafts left out.
        other_rows: int64 ``[num_other_rows]``; these rows in the flat batch.
    """

    requests: torch.Tensor
    contexts: torch.Tensor
    rows: torch.Tensor
    levels: list[StateLevel]
    others: torch.Tensor
    other_lens: torch.Tensor
    other_rows: torch.Tensor


def state_rows(
    parents: torch.Tensor,
    num_rows: torch.Tensor,
    row_start: torch.Tensor,
    num_scheduled_tokens: np.ndarray,
    context_lens: torch.Tensor,
) -> StateRows:
    """Sort the rows of a forward by depth.

    A request whose tree is a root only has none, nor has one with prompt rows before its root: its drafts do not count.

    Args:
        parents: int64 ``[num_reqs, width]``; of the trees' rows.
        num_rows: int64 ``[num_reqs]``; rows of each tree.
        row_start: int64 ``[num_reqs]``; flat row of each root.
        num_scheduled_tokens: int ``[num_reqs]``; rows of each request.
        context_lens: int ``[num_reqs]``.
    """
    count, root, scheduled = num_rows.numpy(), row_start.numpy(), num_scheduled_tokens
    sizes = np.where((count > 1) & (count == scheduled), count, 0)
    width = parents.shape[1]
    request, row = np.nonzero(np.arange(width) < sizes[:, None])
    flat = root[request] + row
    others, first = np.flatnonzero(sizes == 0), np.cumsum(scheduled) - scheduled
    lens = (root + 1 - first)[others]
    starts = np.repeat(first[others] - (np.cumsum(lens) - lens), lens)
    requests = torch.from_numpy(np.flatnonzero(sizes))
    return StateRows(
        requests=requests,
        contexts=context_lens[requests].long(),
        rows=torch.from_numpy(flat),
        levels=_levels(parents.numpy(), depths_from_parents(parents).numpy(), request, row, flat),
        others=torch.from_numpy(others),
        other_lens=torch.from_numpy(lens),
        other_rows=torch.from_numpy(starts + np.arange(len(starts))),
    )


def rows_of_one_tree(parents: np.ndarray) -> StateRows:
    """Return the rows of a forward that has this tree only: int64 ``[num_rows]``."""
    rows, none = np.arange(len(parents)), torch.empty(0, dtype=torch.int64)
    depths = depths_from_parents(torch.from_numpy(parents).unsqueeze(0)).numpy()
    levels = _levels(parents[None], depths, np.zeros_like(rows), rows, rows)
    first = torch.zeros(1, dtype=torch.int64)
    return StateRows(first, first, torch.from_numpy(rows), levels, none, none, none)


def _levels(
    parents: np.ndarray, depths: np.ndarray, request: np.ndarray, row: np.ndarray, flat: np.ndarray
) -> list[StateLevel]:
    """Sort tree rows by depth.

    Args:
        parents, depths: int64 ``[num_reqs, width]``.
        request, row, flat: int64 ``[num_tree_rows]``; each row's request, its row in the tree and in the flat batch.
    """
    depth_of, place, levels = depths[request, row], np.zeros_like(parents), []
    for depth in range(int(depth_of.max(initial=-1)) + 1):
        at = depth_of == depth
        above = place[request[at], parents[request[at], row[at]]] if depth else np.zeros(int(at.sum()), np.int64)
        levels.append(StateLevel(torch.from_numpy(flat[at]), torch.from_numpy(above)))
        place[request[at], row[at]] = 1 + np.arange(len(above))
    return levels


@dataclass(frozen=True)
class StateStep:
    """What the layers of one KV cache group compute in a step with trees.

    Attributes:
        rows: of the step.
        others: vLLM's metadata of the requests without a tree; None if there are none.
        blocks: int64 ``[num_trees]``; where the roots' parents have their states.
        levels: vLLM's metadata of each level, on states ``1 ... num_rows`` of a copy.
        inputs: by layer name, what the commit needs of it: inputs ``[num_tree_rows, ...]``, and an empty output.
    """

    rows: StateRows
    others: Any
    blocks: torch.Tensor
    levels: Sequence[Any]
    inputs: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)


def compute(
    layer: Any, name: str, step: StateStep, core: Core, inputs: Sequence[torch.Tensor], output: torch.Tensor
) -> None:
    """Compute all rows of a layer.

    Args:
        layer: with its states, ``kv_cache``.
        name: of the layer.
        step: of its group.
        core: of the layer.
        inputs: ``[num_tokens, ...]`` each.
        output: ``[num_tokens, ...]``; written in place.
    """
    if step.others is not None:
        _compute_rows(core, step.others, inputs, output, step.rows.other_rows)
    step.inputs[name] = (*(one[step.rows.rows] for one in inputs), output.new_empty(0, *output.shape[1:]))
    states, places = layer.kv_cache, step.blocks
    for depth, (level, metadata) in enumerate(zip(step.rows.levels, step.levels, strict=True)):
        states = copies(states, level.parents if depth else places)
        with own_states(layer, states):
            _compute_rows(core, metadata, inputs, output, level.rows)


def copies(states: Sequence[torch.Tensor], places: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Copy states to places from 1 on; vLLM's kernels skip place 0.

    Args:
        states: ``[num_places, ...]`` each.
        places: int64 ``[num_rows]``; of the states to copy.
    """
    copied = []
    for one in states:
        new = one.new_empty(len(places) + 1, *one.shape[1:])
        new[1:] = one[places]
        copied.append(new)
    return tuple(copied)


@contextmanager
def own_states(layer: Any, states: tuple[torch.Tensor, ...]):
    """Let a layer read and write these states inside the context."""
    kept, layer.kv_cache = layer.kv_cache, states
    try:
        yield
    finally:
        layer.kv_cache = kept


def _compute_rows(
    core: Core, metadata: Any, inputs: Sequence[torch.Tensor], output: torch.Tensor, rows: torch.Tensor
) -> None:
    """Compute some rows: int64 ``[num_rows]``."""
    part = torch.zeros(len(rows), *output.shape[1:], dtype=output.dtype)
    core(metadata, [one[rows] for one in inputs], part)
    output[rows] = part


def commit_states(
    step: StateStep,
    source_rows: torch.Tensor,
    layers: Mapping[str, tuple[Any, Core]],
    block_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    decodes: Callable[[torch.Tensor], Any],
) -> None:
    """Decode the accepted rows on the requests' own states.

    Args:
        step: of the group.
        source_rows: int64 ``[num_reqs, max_emitted]``; see ``StepPlan``.
        layers: the group's: layer and core, by name.
        block_of: returns the blocks of tokens, from requests and positions, int64 ``[num_rows]`` both.
        decodes: returns vLLM's metadata for decodes of one token on the states in these blocks.
    """
    rows, paths = step.rows, source_rows[step.rows.requests]
    before = step.blocks
    for depth in range(paths.shape[1]):
        goes_on = paths[:, depth] >= 0
        if not goes_on.any():
            return
        requests, flat = rows.requests[goes_on], paths[goes_on, depth]
        blocks = block_of(requests, rows.contexts[goes_on] + depth)
        places, metadata = torch.searchsorted(rows.rows, flat), decodes(blocks)
        for name, (layer, core) in layers.items():
            _move(layer.kv_cache, before[goes_on], blocks)
            *inputs, output = step.inputs[name]
            core(metadata, [one[places] for one in inputs], output.new_empty(len(places), *output.shape[1:]))
        before = before.masked_scatter(goes_on, blocks)


def _move(states: Sequence[torch.Tensor], before: torch.Tensor, blocks: torch.Tensor) -> None:
    """Copy the states of requests that come to another block: int64 ``[num_rows]`` both."""
    moved = before != blocks
    if moved.any():
        for one in states:
            one[blocks[moved]] = one[before[moved]]
