"""Growing a draft tree level by level into a pool (EAGLE-2, section 4.1, expansion phase).

Each draft level appends the children of the fed nodes to the pool and picks the best new nodes to feed next.
``pruning.rerank_draft`` then selects the tree from the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from vllm_specplug.core.draft_sampling import Children, likeliest
from vllm_specplug.core.pool import NEVER, Beam, DraftPool, new_pool
from vllm_specplug.core.pruning import rerank_draft
from vllm_specplug.types import Draft


def expand(pool: DraftPool, beam: torch.Tensor | None, token_ids: torch.Tensor, log_probs: torch.Tensor) -> DraftPool:
    """Append one level to the pool, in place.

    Args:
        pool: the pool to extend.
        beam: int64 ``[num_reqs, beam_width]``; pool indices of the nodes that the drafter was fed, or None for the
            first level, whose parent is the root (``beam_width`` is then 1).
        token_ids: int ``[num_reqs, beam_width, draft_top_k]``; the children of each fed node, best first.
        log_probs: float ``[num_reqs, beam_width, draft_top_k]``; their log probabilities.  NaN and -inf mean "no node";
            above 0 counts as 0, because values must not grow along a path.

    Returns:
        ``pool`` itself.
    """
    start, stop = pool.size, pool.size + token_ids.shape[1] * token_ids.shape[2]
    if stop > pool.token_ids.shape[1]:
        raise ValueError(f"the pool holds {pool.token_ids.shape[1]} nodes, {stop} would be drafted")
    # Accumulate in float32 whatever the drafter computes in: bfloat16 sums would tie most siblings.
    values = log_probs.float().nan_to_num(nan=NEVER, posinf=0.0, neginf=NEVER).clamp(max=0.0)
    if beam is not None:
        # Adding a number <= 0 never rounds up past the parent's value, so the tree stays monotone.
        values = values + pool.log_values.gather(1, beam).unsqueeze(2)
        pool.parents[:, start:stop] = beam.unsqueeze(2).expand_as(token_ids).flatten(1)
    pool.token_ids[:, start:stop] = token_ids.flatten(1)
    pool.log_values[:, start:stop] = values.flatten(1)
    pool.num_levels += 1
    pool.depths[:, start:stop] = pool.num_levels
    pool.level_start, pool.size = start, stop
    return pool


def next_beam(pool: DraftPool, draft_top_k: int) -> torch.Tensor:
    """Pick the nodes of the newest level to feed to the drafter next.

    Returns:
        int64 ``[num_reqs, beam_width]``, ``beam_width = min(draft_top_k, level width)``; pool indices of the best
        nodes by value (ties to the lower index), in ascending order.
    """
    if pool.size - pool.level_start <= draft_top_k:
        everything = torch.arange(pool.level_start, pool.size, device=pool.log_values.device)
        return everything.expand(pool.log_values.shape[0], -1)
    # Unlike torch.topk, a stable sort keeps the order of equal values.
    order = pool.log_values[:, pool.level_start : pool.size].sort(dim=1, descending=True, stable=True).indices
    return order[:, :draft_top_k].sort(dim=1).values + pool.level_start


def deeper_nodes_can_enter(pool: DraftPool, num_nodes: int) -> torch.Tensor:
    """Tell whether any deeper node could still be among the best ``num_nodes``.

    A deeper node has at most the best value of the newest level and loses ties to every node already drafted.

    Returns:
        bool ``[num_reqs]``.
    """
    drafted = pool.log_values[:, : pool.size]
    bound = drafted[:, pool.level_start :].amax(dim=1, keepdim=True)
    if pool.size < num_nodes:
        return bound.squeeze(1) > NEVER
    at_least_as_good = (drafted >= bound).sum(dim=1)
    return (at_least_as_good < num_nodes) & (bound.squeeze(1) > NEVER)


def grow_level(
    pool: DraftPool,
    beam: Beam | None,
    token_ids: torch.Tensor,
    log_probs: torch.Tensor,
    num_nodes: int,
    static: bool = False,
) -> Beam | None:
    """Append one level to the pool, in place, and pick what to feed next: ``expand``, then ``next_beam``.

    Args:
        pool: the pool to extend.
        beam: the nodes that were fed; None for the first level.
        token_ids: int ``[num_reqs * beam_width, draft_top_k]``; the children of each, best first.
        log_probs: float ``[num_reqs * beam_width, draft_top_k]``; see ``expand``.
        num_nodes: nodes that the tree will have.
        static: never stop early because of the values.  Only on a CPU are values read at all.

    Returns:
        None where the growth ends: the pool is full, or no deeper node could be kept.
    """
    num_reqs, top_k = pool.token_ids.shape[0], token_ids.shape[1]
    device, shape = token_ids.device, (num_reqs, -1, top_k)
    expand(pool, None if beam is None else beam.nodes, token_ids.view(shape), log_probs.view(shape))
    if pool.size == pool.token_ids.shape[1]:
        return None
    sync_is_cheap = device.type == "cpu" and not static  # reading a flag back stalls other devices
    if sync_is_cheap and not deeper_nodes_can_enter(pool, num_nodes).any():
        return None
    nodes = next_beam(pool, top_k)
    # Which of the last fed nodes is each beam node's parent: columns are (beam parent, child rank).
    parent = (nodes - pool.level_start) // top_k
    mask = torch.eye(nodes.shape[1], dtype=torch.bool, device=device).expand(num_reqs, -1, -1)
    num_fed = 1
    if beam is not None:
        num_fed = beam.nodes.shape[1]
        above = beam.mask.gather(1, parent.unsqueeze(2).expand(-1, -1, beam.mask.shape[2]))
        mask = torch.cat([above, mask], dim=2)
    first = torch.arange(0, num_reqs * num_fed, num_fed, device=device).unsqueeze(1)
    values = pool.log_values.gather(1, nodes)
    return Beam(nodes, pool.token_ids.gather(1, nodes), values, (first + parent).flatten(), mask)


@dataclass(frozen=True)
class GrowthOps:
    """The functions of a growth: this package's, or kernels that do the same.

    Attributes:
        new_pool: see ``pool.new_pool``.
        grow_level: see ``grow_level``.
        rerank_draft: see ``pruning.rerank_draft``.
        static: whether all levels are drafted, so that no value is read back.
        likeliest: see ``draft_sampling.likeliest``.
    """

    new_pool: Callable[[int, int, int, torch.device], DraftPool]
    grow_level: Callable[[DraftPool, Beam | None, torch.Tensor, torch.Tensor, int], Beam | None]
    rerank_draft: Callable[[DraftPool, torch.Tensor, int, float], tuple[Draft, torch.Tensor]]
    static: bool
    likeliest: Callable[[torch.Tensor, int, torch.Tensor | None], Children] = likeliest


#: They end a growth early where they may look at values: on a CPU.
TORCH = GrowthOps(new_pool, grow_level, rerank_draft, static=False)
TORCH_STATIC = GrowthOps(new_pool, partial(grow_level, static=True), rerank_draft, static=True)
