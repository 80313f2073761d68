"""Growing one EAGLE-2 tree per request: expand level by level, then rerank (EAGLE-2, section 4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from vllm_specplug.core.draft_sampling import Children, stack_candidates
from vllm_specplug.core.growth import grow_level
from vllm_specplug.core.pool import new_pool
from vllm_specplug.core.pruning import rerank_draft
from vllm_specplug.types import Draft, Proposal


@dataclass(frozen=True)
class DraftFeatures:
    """What one drafter forward gives for each row.

    Attributes:
        score: ``[..., hidden_size]``; goes to the LM head.
        feed: ``[..., hidden_size]``; input feature of the row's children (EAGLE-1/2: the same tensor).
    """

    score: torch.Tensor
    feed: torch.Tensor


#: ``score(level, hidden [num_rows, hidden_size], top_k)``: the children of the nodes fed at ``level``, the root's at 0.
Score = Callable[[int, torch.Tensor, int], Children]

#: ``forward(level, token_ids [R, b], features [R, b, h], mask [R, b, (level + 1) * b]) -> DraftFeatures`` of
#: ``[R, b, h]``: run the drafter over the ``b`` nodes fed at ``level`` (from 0).  Each sees the context, and the
#: nodes fed so far (level-major) as the mask says: its ancestors and itself.
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
    static: bool = False,
) -> Draft:
    """Draft a tree for every request.

    Args:
        root_token_ids: int64 ``[num_reqs]``; last emitted tokens.
        root: features ``[num_reqs, hidden_size]`` of the drafter's re-seeding forward at those tokens.
        score, forward: the drafter.
        num_nodes: nodes to keep.
        draft_depth: levels to draft at the most; ``draft_depth - 1`` forwards.
        draft_top_k: beam width and children per node.
        min_node_value: nodes of a lower value are not kept.
        may_grow: told the values ``[num_reqs, draft_top_k]`` of the nodes to feed next, ends the growth where it says
            false (on a CPU only: elsewhere asking costs more than drafting).
        static: always draft all levels, which needs no look at the values (a CUDA device never looks).
    """
    num_reqs = root_token_ids.shape[0]
    device = root_token_ids.device
    pool = new_pool(num_reqs, draft_top_k, draft_depth, device)
    levels = [score(0, root.score, draft_top_k)]
    beam = grow_level(pool, None, levels[0].token_ids, levels[0].log_probs, num_nodes, static)
    features = root.feed
    sync_is_cheap = device.type == "cpu" and not static and may_grow is not None
    while beam is not None and not (sync_is_cheap and not may_grow(beam.log_values.exp())):
        inputs = features.index_select(0, beam.sources).unflatten(0, beam.nodes.shape)
        fed = forward(len(levels) - 1, beam.token_ids, inputs, beam.mask)
        features = fed.feed.flatten(0, 1)
        levels.append(score(len(levels), fed.score.flatten(0, 1), draft_top_k))
        beam = grow_level(pool, beam, levels[-1].token_ids, levels[-1].log_probs, num_nodes, static)
    draft, places = rerank_draft(pool, root_token_ids, num_nodes, min_node_value)
    candidates = stack_candidates(levels, num_reqs)
    if candidates is None:
        return draft
    # The pool holds ``draft_top_k`` children of each fed node, in the order of feeding.
    return replace(draft, proposal=Proposal(places.div(draft_top_k, rounding_mode="floor"), *candidates))
