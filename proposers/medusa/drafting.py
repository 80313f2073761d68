"""Draft trees from the heads' logits, one per request: a fixed sparse shape, or a shape chosen in each step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch.nn.functional import pad

from vllm_specplug.core.draft_sampling import Children, DraftSampling, stack_candidates
from vllm_specplug.core.growth import TORCH, GrowthOps, expand, next_beam
from vllm_specplug.core.pool import new_pool
from vllm_specplug.core.tree import static_tree
from vllm_specplug.types import PADDING, Draft, Proposal

from .sparse_tree import Paths, in_draw_order, parents_of


def fill_tree(
    root_token_ids: torch.Tensor,
    logits: torch.Tensor,
    draft_ids: torch.Tensor | None,
    paths: Paths,
    sampling: DraftSampling | None = None,
    ops: GrowthOps = TORCH,
) -> Draft:
    """Fill a fixed shape: the node ``(..., i)`` at depth ``k`` holds the ``i``-th best token of head ``k``.

    Args:
        root_token_ids: int64 ``[num_reqs]``; last emitted tokens.
        logits: float ``[num_reqs, num_heads, draft_vocab]``.
        draft_ids: int64 ``[draft_vocab]``; target id of each draft id; None: the target's vocabulary.
        paths: the shape, at most as deep as there are heads.
        sampling: how to sample the tokens; None: take the likeliest tokens.
        ops: the torch functions, or operators that do the same.
    """
    if sampling is not None:
        paths = in_draw_order(paths)
    levels = _children(logits, draft_ids, max(max(path) for path in paths) + 1, sampling, ops)
    token_ids = torch.stack([level.token_ids for level in levels], dim=1)
    log_probs = torch.stack([level.log_probs for level in levels], dim=1)
    guesses = _guesses_of(paths, len(levels), logits.device)
    tree = static_tree(root_token_ids, token_ids[:, guesses.heads, guesses.ranks], parents_of(paths))
    along_paths = log_probs[:, torch.arange(len(levels), device=logits.device), guesses.path_ranks]
    # A child adds a number <= 0 to its parent's sum, in the same order, so its value never exceeds its parent's.
    log_values = along_paths.masked_fill(~guesses.on_path, 0.0).sum(dim=2)
    return _with_proposal(Draft(tree, pad(log_values, (1, 0))), levels)


@dataclass(frozen=True)
class _Guesses:
    """The heads' guesses along the paths of a shape.

    Attributes:
        heads, ranks: int64 ``[num_nodes]``; the head of each node and the rank of its guess.
        path_ranks: int64 ``[num_nodes, num_heads]``; the rank of each head's guess on the path to the node; 0 for heads
            beyond the node's depth.
        on_path: bool ``[num_nodes, num_heads]``; false for heads beyond the node's depth.
    """

    heads: torch.Tensor
    ranks: torch.Tensor
    path_ranks: torch.Tensor
    on_path: torch.Tensor


@lru_cache(maxsize=64)
def _guesses_of(paths: Paths, num_heads: int, device: torch.device) -> _Guesses:
    """Compute the guesses of a shape; cached, so that a draft phase on a GPU copies nothing from the CPU."""
    lens = torch.tensor([len(path) for path in paths])
    padded = torch.tensor([[*path, *[0] * (num_heads - len(path))] for path in paths])
    on_path = torch.arange(num_heads) < lens.unsqueeze(1)
    ranks = torch.tensor([path[-1] for path in paths])
    return _Guesses(*(values.to(device) for values in (lens - 1, ranks, padded, on_path)))


def choose_tree(
    root_token_ids: torch.Tensor,
    logits: torch.Tensor,
    draft_ids: torch.Tensor | None,
    *,
    num_nodes: int,
    draft_top_k: int,
    min_node_value: float = 0.0,
    sampling: DraftSampling | None = None,
    ops: GrowthOps = TORCH,
) -> Draft:
    """Keep the ``num_nodes`` combinations with the largest product of head probabilities.

    Args:
        root_token_ids, logits, draft_ids, sampling, ops: as in ``fill_tree``.
        num_nodes: nodes to keep.
        draft_top_k: guesses per head, and nodes extended at each level.
        min_node_value: nodes of a lower value are not kept.
    """
    num_reqs, num_heads, _ = logits.shape
    levels = _children(logits, draft_ids, draft_top_k, sampling, ops)
    pool = new_pool(num_reqs, draft_top_k, num_heads, logits.device)
    expand(pool, None, levels[0].token_ids.unsqueeze(1), levels[0].log_probs.unsqueeze(1))
    for level in levels[1:]:
        # A head's guesses do not depend on the path before them: all nodes of a level have the same children.
        beam = next_beam(pool, draft_top_k)
        shape = (num_reqs, beam.shape[1], draft_top_k)
        expand(pool, beam, level.token_ids.unsqueeze(1).expand(shape), level.log_probs.unsqueeze(1).expand(shape))
    return _with_proposal(ops.rerank_draft(pool, root_token_ids, num_nodes, min_node_value)[0], levels)


def _children(
    logits: torch.Tensor, draft_ids: torch.Tensor | None, count: int, sampling: DraftSampling | None, ops: GrowthOps
) -> list[Children]:
    """Guesses of each head.  All nodes of a level share them; sampling allows that, as a walk visits one node."""
    if sampling is None:
        children = ops.likeliest(logits.flatten(0, 1), count, draft_ids)
        by_head = (
            values.unflatten(0, logits.shape[:2]).unbind(1) for values in (children.token_ids, children.log_probs)
        )
        return [Children(*one) for one in zip(*by_head, strict=True)]
    heads = enumerate(logits.unbind(1))
    return [sampling.children(head, level, count, draft_ids) for level, head in heads]


def _with_proposal(draft: Draft, levels: list[Children]) -> Draft:
    """Add the heads' draft distributions, if there are any; a node at depth ``k`` is a guess of head ``k``."""
    candidates = stack_candidates(levels, len(draft.tree.token_ids))
    if candidates is None:
        return draft
    index = (draft.tree.depths - 1).masked_fill(draft.tree.token_ids == PADDING, PADDING)
    return replace(draft, proposal=Proposal(index, *candidates))
