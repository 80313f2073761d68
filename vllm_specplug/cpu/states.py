"""Recurrent states in a step with trees: the state of a node continues its parent's.

The rows of one depth are sequences of one row: each continues a state of the depth before, and writes a new one.
States live in one layer, for two depths.  A request's own state stays as it is in the forward.  The commit then runs
the accepted rows anew, on the request's own state: only the inputs of the layer are kept per node, not states.  So a
rejected row leaves nothing behind, and vLLM's state slots for draft tokens are not needed.

Rows of prompts, of plain decoding and of trees have one arithmetic: ``kernels/state_scan.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vllm_specplug.core.tree import depths_from_parents
from vllm_specplug.cpu.kernels.state_scan import Sequences

#: The states of a layer: ``[num_places, ...]`` each.
States = Sequence[torch.Tensor]

#: ``core(sequences, before, after, inputs, output)`` computes a layer's convolution and recurrence for the rows of
#: ``inputs``.  Sequences begin with states of ``before``, and leave theirs in ``after``.
Core = Callable[[Sequences, States, States, Sequence[torch.Tensor], torch.Tensor], None]


@dataclass(frozen=True)
class StateLevel:
    """Tree rows of one depth.

    Attributes:
        rows: int64 ``[num_rows]``; in the flat batch.
        parents: int64 ``[num_rows]``; the parent's row in the level before; 0 for roots.
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
        place[request[at], row[at]] = np.arange(len(above))
    return levels


@dataclass(frozen=True)
class StateStep:
    """What the layers of one KV cache group compute in a step.

    Attributes:
        others: the requests without a tree, in the order of their rows.
        rows: of the step; None if it has no trees, and ``others`` are all its rows.
        blocks: int64 ``[num_trees]``; where the roots' parents have their states.
        inputs: by layer name, what the commit needs of it: inputs ``[num_tree_rows, ...]``, and an empty output.
    """

    others: Sequences
    rows: StateRows | None
    blocks: torch.Tensor
    inputs: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)

    def levels(self) -> list[tuple[torch.Tensor, Sequences]]:
        """Return the rows of each level, and what they continue, in states of the level before."""
        assert self.rows is not None
        sources = [level.parents if depth else self.blocks for depth, level in enumerate(self.rows.levels)]
        places = [torch.arange(len(level.rows)) for level in self.rows.levels]
        return [
            (level.rows, Sequences.single(*both))
            for level, *both in zip(self.rows.levels, sources, places, strict=True)
        ]


def compute(
    name: str, own: States, step: StateStep, core: Core, inputs: Sequence[torch.Tensor], output: torch.Tensor
) -> None:
    """Compute all rows of a layer.

    Args:
        name: of the layer.
        own: its states, those of the requests.
        step: of its group.
        core: of the layer.
        inputs: ``[num_tokens, ...]`` each.
        output: ``[num_tokens, ...]``; written in place.
    """
    if step.rows is None:
        rows = slice(int(step.others.starts[-1]))
        return core(step.others, own, own, [one[rows] for one in inputs], output[rows])
    if len(step.others.places):
        _compute_rows(core, step.others, own, own, inputs, output, step.rows.other_rows)
    step.inputs[name] = (*(one[step.rows.rows] for one in inputs), output.new_empty(0, *output.shape[1:]))
    before = own
    for rows, sequences in step.levels():
        after = [one.new_empty(len(rows), *one.shape[1:]) for one in before]
        _compute_rows(core, sequences, before, after, inputs, output, rows)
        before = after


def _compute_rows(
    core: Core,
    sequences: Sequences,
    before: States,
    after: States,
    inputs: Sequence[torch.Tensor],
    output: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """Compute some rows: int64 ``[num_rows]``."""
    part = output.new_empty(len(rows), *output.shape[1:])
    core(sequences, before, after, [one[rows] for one in inputs], part)
    output[rows] = part


def commit_states(
    step: StateStep,
    source_rows: torch.Tensor,
    layers: Mapping[str, tuple[Any, Core]],
    block_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Run the accepted rows on the requests' own states.

    Where an accepted path goes on in the next block, the state at the block's end stays there, for cached prefixes.

    Args:
        step: of the group, with trees.
        source_rows: int64 ``[num_reqs, max_emitted]``; see ``StepPlan``.
        layers: the group's: layer and core, by name.
        block_of: returns the blocks of tokens, from requests and positions, int64 ``[num_trees, max_emitted]`` both.
    """
    rows, paths = step.rows, source_rows[step.rows.requests]
    accepted, depths = paths >= 0, torch.arange(paths.shape[1])
    positions = rows.contexts.unsqueeze(1) + torch.where(accepted, depths, 0)
    blocks = block_of(rows.requests.unsqueeze(1).expand_as(positions), positions)
    in_first = blocks == step.blocks.unsqueeze(1)
    for part in (accepted & in_first, accepted & ~in_first):
        if not part.any():
            continue
        counts, last = part.sum(1), (depths * part).amax(1, keepdim=True)
        goes_on = counts > 0
        starts = torch.cat([counts.new_zeros(1), counts[goes_on].cumsum(0)])
        sequences = Sequences(starts, step.blocks[goes_on], blocks.gather(1, last).squeeze(1)[goes_on])
        kept = torch.searchsorted(rows.rows, paths[part])
        for name, (layer, core) in layers.items():
            *inputs, output = step.inputs[name]
            own = layer.kv_cache
            core(sequences, own, own, [one[kept] for one in inputs], output.new_empty(len(kept), *output.shape[1:]))
