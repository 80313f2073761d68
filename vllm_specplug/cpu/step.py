"""One step of the CPU engine: stage, verify, walk, commit, draft.

vLLM splits a step at its forward; the overrides in ``runner.py`` call these phases in this order:

``_prepare_inputs``             stage     the scheduled drafts become trees; their rows get positions and masks
``_build_attention_metadata``   verify    the target's layers get the trees; then vLLM's forward runs
``_sample``                     walk      vLLM's sampler selects the accepted path
``_sample``                     commit    the accepted rows' key/value goes to the pages
``propose_draft_token_ids``     draft     the drafter reads the accepted rows and grows the next trees: ``draft.py``

A step without drafts is vLLM's own, up to the draft.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vllm_specplug.core.step import StepPlan
from vllm_specplug.core.tree_rows import CpuTreeRows
from vllm_specplug.cpu.drafters.flat_draft import FlatDraft
from vllm_specplug.cpu.kernels.tree_ops import from_flat, lay_out, plan_step
from vllm_specplug.cpu.kv import KeptRows, write_accepted
from vllm_specplug.cpu.states import StateRows
from vllm_specplug.cpu.walk import SampledWalk
from vllm_specplug.types import TokenTree, Walk
from vllm_specplug.vllm.kv_groups import AlikeLayers


@dataclass(frozen=True)
class Step:
    """The trees of one verification forward.

    Attributes:
        tree: trees of all requests, in batch order; a request without drafts is a root.
        row_start: int64 ``[num_reqs]``; flat row of each root in the forward.
        logits_start: int64 ``[num_reqs]``; row of each root in the logits.
        num_tokens: flat rows of the forward.
        drafts: each request's draft if all of it is verified, else None.
        rows: arguments of attention for the rows that attend by a mask; None if there are none.
        positions: int64 ``[num_tree_rows]``; rotary positions of these rows.
        moves: int64 ``[num_tree_rows]``; these positions less the flat ones (for M-RoPE).
        states: the rows as layers with recurrent states compute them; None: the target has no such layers.
    """

    tree: TokenTree
    row_start: torch.Tensor
    logits_start: torch.Tensor
    num_tokens: int
    drafts: Sequence[FlatDraft | None]
    rows: CpuTreeRows | None = None
    positions: torch.Tensor | None = None
    moves: torch.Tensor | None = None
    states: StateRows | None = None


def stage(
    input_ids: torch.Tensor,
    num_scheduled_tokens: np.ndarray,
    num_drafts: np.ndarray,
    parents: np.ndarray,
    drafts: Sequence[FlatDraft | None],
    context_lens: torch.Tensor,
    kept: KeptRows,
) -> Step:
    """Build the trees and lay out their rows.

    Args:
        input_ids: int32 ``[num_tokens]``; of the forward.
        num_scheduled_tokens, num_drafts: int ``[num_reqs]``; rows of each request, and its nodes among them.
        parents: int64 ``[num_reqs, width]``; row of each row's parent.
        drafts: see ``Step``.
        context_lens: int ``[num_reqs]``; cached tokens.
        kept: memory for the key/value of the tree rows.
    """
    num_rows, width = num_drafts + 1, parents.shape[1]
    last = np.cumsum(num_scheduled_tokens)
    row_start, num_tokens = last - num_rows, int(last[-1])
    columns = row_start[:, None] + np.arange(width)
    # vLLM clamps its -1 placeholders in input_ids only at the forward: here they still match nothing.
    token_ids = input_ids[torch.from_numpy(np.minimum(columns, num_tokens - 1))]
    step = Step(
        tree=from_flat(token_ids, torch.from_numpy(parents), torch.from_numpy(num_rows)),
        row_start=torch.from_numpy(row_start),
        logits_start=torch.from_numpy(np.cumsum(num_rows) - num_rows),
        num_tokens=num_tokens,
        drafts=drafts,
    )
    # A request with prompt rows before its root has no nodes that count: it attends as vLLM does.
    lens = np.where(num_scheduled_tokens == num_rows, num_rows, 0)
    if not lens.any():
        return step
    valid = np.arange(width) < lens[:, None]
    flat_rows, depths = torch.from_numpy(columns[valid]), step.tree.depths.numpy()
    layout = lay_out(step.tree, context_lens)
    start, lens = (torch.from_numpy(rows.astype(np.int32)) for rows in (row_start, lens))
    kept_rows, kept_of = kept.of(len(flat_rows))
    rows = CpuTreeRows(
        context_lens=context_lens.to(torch.int32),
        query_start=start,
        query_lens=lens,
        tree_start=start,
        tree_lens=lens,
        mask=layout.mask,
        all_rows=len(flat_rows) == num_tokens,
        commit_rows=flat_rows,
        kept=kept_rows,
        kept_of=kept_of,
    )
    positions = torch.from_numpy(layout.positions.numpy()[valid])
    moves = torch.from_numpy((depths - np.arange(width))[valid])
    return replace(step, rows=rows, positions=positions, moves=moves)


def verify(step: Step, attn_metadata: dict[str, Any], draft_layers: Collection[str]) -> None:
    """Give the target's layers metadata with the trees, in place; layers that share metadata share it still.

    Layers with a recurrent state have theirs from the builder: ``state_layers.py``.
    """
    with_trees: dict[int, Any] = {}
    for name, metadata in attn_metadata.items():
        if step.rows is not None and name not in draft_layers and hasattr(metadata, "tree"):
            if id(metadata) not in with_trees:
                with_trees[id(metadata)] = replace(metadata, tree=step.rows)
            attn_metadata[name] = with_trees[id(metadata)]


def walk(step: Step, logits: torch.Tensor, walker: SampledWalk, active: np.ndarray) -> tuple[Walk, Any]:
    """Select the accepted paths; return the walk and vLLM's sampler output.

    Args:
        step: the staged step.
        logits: ``[num_logits_rows, vocab_size]``.
        walker: of the kind of verification.
        active: bool ``[num_reqs]``; requests that emit tokens.
    """
    return walker(step.tree, logits, step.logits_start, torch.from_numpy(active))


def commit(step: Step, walked: Walk, layers: Sequence[AlikeLayers], block_table: Any) -> StepPlan:
    """Write the accepted key/value to the pages; return the rows that the drafter reads next."""
    plan = plan_step(walked, step.row_start, step.num_tokens)
    if step.rows is not None:
        write_accepted(step.rows, plan, layers, block_table)
    return plan
