"""Growing one EAGLE-2 tree per request: expand level by level, then rerank (EAGLE-2, section 4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from vllm_specplug.draft_sampling import Children, stack_candidates
from vllm_specplug.tree import expand, growth_can_pay, new_pool, next_beam, rerank_draft
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
    children = [score(0, root.score, draft_top_k)]
    expand(pool, None, children[0].token_ids.unsqueeze(1), children[0].log_probs.unsqueeze(1))
    features, ancestors = root.feed.unsqueeze(1), None
    may_ask = device.type == "cpu" and not static  # reading a flag back stalls other devices
    for level in range(draft_depth - 1):
        if may_ask and not growth_can_pay(pool, num_nodes).any():
            break
        beam = next_beam(pool, draft_top_k)
        if may_ask and may_grow is not None and not may_grow(pool.log_values.gather(1, beam).exp()):
            break
        # Which of the last fed nodes is each beam node's parent: columns are (beam parent, child rank).
        parent = (beam - pool.level_start) // draft_top_k
        mask = torch.eye(draft_top_k, dtype=torch.bool, device=device).expand(num_reqs, -1, -1)
        if ancestors is not None:
            mask = torch.cat([_pick(ancestors, parent), mask], dim=2)
        fed = forward(level, pool.token_ids.gather(1, beam), _pick(features, parent), mask)
        children.append(score(level + 1, fed.score.flatten(0, 1), draft_top_k))
        shape = (num_reqs, draft_top_k, draft_top_k)
        expand(pool, beam, children[-1].token_ids.view(shape), children[-1].log_probs.view(shape))
        features, ancestors = fed.feed, mask
    draft, places = rerank_draft(pool, root_token_ids, num_nodes, min_node_value)
    candidates = stack_candidates(children, num_reqs)
    if candidates is None:
        return draft
    # The pool holds ``draft_top_k`` children of each fed node, in the order of feeding.
    return replace(draft, proposal=Proposal(places.div(draft_top_k, rounding_mode="floor"), *candidates))


def _pick(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``values [R, a, n]`` at ``index [R, b]`` -> ``[R, b, n]``."""
    return values.gather(1, index.unsqueeze(2).expand(-1, -1, values.shape[2]))
