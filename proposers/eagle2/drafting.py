"""Growth of one EAGLE-2 tree per request: expand level by level, then rerank (EAGLE-2, section 4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from vllm_specplug.core.draft_sampling import Children, stack_candidates
from vllm_specplug.core.growth import TORCH, GrowthOps
from vllm_specplug.types import Draft, Proposal


@dataclass(frozen=True)
class DraftFeatures:
    """Outputs of one drafter forward for each row.

    Attributes:
        score: ``[..., hidden_size]``; input of the LM head.
        feed: ``[..., hidden_size]``; input feature of the row's children (EAGLE-1/2: the same tensor).
    """

    score: torch.Tensor
    feed: torch.Tensor


#: ``score(level, hidden [num_rows, hidden_size], top_k)``: the children of the rows, which form draft level ``level``
#: (from 0).
Score = Callable[[int, torch.Tensor, int], Children]

#: ``forward(level, token_ids [R, b], features [R, b, h], mask [R, b, (level + 1) * b]) -> DraftFeatures`` of
#: ``[R, b, h]``: run the drafter over the ``b`` nodes fed at ``level`` (from 0).  A node attends to the context and,
#: of the nodes fed so far (level-major), to the nodes that the mask allows: its ancestors and itself.
Forward = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], DraftFeatures]


def grow_tree(
    root_token_ids: torch.Tensor,
    root: DraftFeatures,
    score: Score,
    forward: Forward,
    *,
    num_nodes: int,
    draft_depth: int,
    draft_top_k: int,
    min_node_value: float = 0.0,
    may_grow: Callable[[torch.Tensor], bool] | None = None,
    ops: GrowthOps = TORCH,
) -> Draft:
    """Draft a tree for each request.

    Args:
        root_token_ids: int64 ``[num_reqs]``; last emitted tokens.
        root: features ``[num_reqs, hidden_size]`` of the drafter's re-seeding forward at those tokens.
        score, forward: the drafter.
        num_nodes: most nodes to keep.
        draft_depth: most levels to draft; a tree of all levels takes ``draft_depth - 1`` forwards.
        draft_top_k: beam width and children per node.
        min_node_value: nodes of a lower value are not kept.
        may_grow: receives the values ``[num_reqs, draft_top_k]`` of the nodes to feed next; false ends the growth.  It
            is called on a CPU only: a synchronisation with another device costs more than drafting.
        ops: the torch functions, or kernels.  Static ones draft all levels without reading values back to the CPU; on a
            CUDA device it is always so.
    """
    num_reqs = root_token_ids.shape[0]
    device = root_token_ids.device
    pool = ops.new_pool(num_reqs, draft_top_k, draft_depth, device)
    levels = [score(0, root.score, draft_top_k)]
    beam = ops.grow_level(pool, None, levels[0].token_ids, levels[0].log_probs, num_nodes)
    features = root.feed
    sync_is_cheap = device.type == "cpu" and not ops.static and may_grow is not None
    while beam is not None and not (sync_is_cheap and not may_grow(beam.log_values.exp())):
        inputs = features.index_select(0, beam.sources).unflatten(0, beam.nodes.shape)
        fed = forward(len(levels) - 1, beam.token_ids, inputs, beam.mask)
        features = fed.feed.flatten(0, 1)
        levels.append(score(len(levels), fed.score.flatten(0, 1), draft_top_k))
        beam = ops.grow_level(pool, beam, levels[-1].token_ids, levels[-1].log_probs, num_nodes)
    draft, indices = ops.rerank_draft(pool, root_token_ids, num_nodes, min_node_value)
    candidates = stack_candidates(levels, num_reqs)
    if candidates is None:
        return draft
    # The pool holds ``draft_top_k`` children of each fed node, in the order of feeding.
    return replace(draft, proposal=Proposal(indices.div(draft_top_k, rounding_mode="floor"), *candidates))
