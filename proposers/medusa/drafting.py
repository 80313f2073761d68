"""From the heads' logits to one draft tree per request: a fixed sparse shape, or a shape chosen per context."""

from __future__ import annotations

from dataclasses import replace

import torch

from vllm_specplug.draft_sampling import Children, DraftSampling, likeliest, stack_candidates
from vllm_specplug.tree import expand, new_pool, next_beam, rerank_draft, static_tree
from vllm_specplug.types import PADDING, Draft, Proposal

from .sparse_tree import Paths, in_draw_order, parents_of


def fill_tree(
    root_token_ids: torch.Tensor,
    logits: torch.Tensor,
    draft_ids: torch.Tensor | None,
    paths: Paths,
    sampling: DraftSampling | None = None,
) -> Draft:
    """Fill a fixed shape: the node ``(..., i)`` at depth ``k`` holds the ``i``-th best token of head ``k``.

    Args:
        root_token_ids: int64 ``[num_reqs]``; last emitted tokens.
        logits: float ``[num_reqs, num_heads, draft_vocab]``.
        draft_ids: int64 ``[draft_vocab]``; target id of each draft id; None: the target's vocabulary.
        paths: the shape, no deeper than there are heads.
        sampling: how to sample; by default the likeliest tokens are taken.
    """
    if sampling is not None:
        paths = in_draw_order(paths)
    ranks = max(max(path) for path in paths) + 1
    levels = _children(logits, draft_ids, ranks, sampling)
    token_ids = torch.stack([level.token_ids for level in levels], dim=1)
    log_probs = torch.stack([level.log_probs for level in levels], dim=1)
    heads = torch.tensor([len(path) - 1 for path in paths])
    last = torch.tensor([path[-1] for path in paths])
    parents = parents_of(paths)
    tree = static_tree(root_token_ids, token_ids[:, heads, last], parents)
    log_values = [log_probs.new_zeros(log_probs.shape[0])]
    for parent, own in zip(parents, log_probs[:, heads, last].unbind(1), strict=True):
        log_values.append(log_values[parent] + own)
    return _with_proposal(Draft(tree, torch.stack(log_values, dim=1)), levels)


def choose_tree(
    root_token_ids: torch.Tensor,
    logits: torch.Tensor,
    draft_ids: torch.Tensor | None,
    *,
    num_nodes: int,
    draft_top_k: int,
    min_node_value: float = 0.0,
    sampling: DraftSampling | None = None,
) -> Draft:
    """Keep the ``num_nodes`` combinations with the largest product of head probabilities.

    Args:
        root_token_ids, logits, draft_ids, sampling: as in ``fill_tree``.
        num_nodes: nodes to keep.
        draft_top_k: guesses per head, and nodes extended per level.
        min_node_value: nodes of a lower value are not kept.
    """
    num_reqs, num_heads, _ = logits.shape
    levels = _children(logits, draft_ids, draft_top_k, sampling)
    pool = new_pool(num_reqs, draft_top_k, num_heads, logits.device)
    expand(pool, None, levels[0].token_ids.unsqueeze(1), levels[0].log_probs.unsqueeze(1))
    for level in levels[1:]:
        # A head knows nothing of the path before it: all nodes of a level have the same children.
        beam = next_beam(pool, draft_top_k)
        shape = (num_reqs, beam.shape[1], draft_top_k)
        expand(pool, beam, level.token_ids.unsqueeze(1).expand(shape), level.log_probs.unsqueeze(1).expand(shape))
    return _with_proposal(rerank_draft(pool, root_token_ids, num_nodes, min_node_value)[0], levels)


def _children(
    logits: torch.Tensor, draft_ids: torch.Tensor | None, count: int, sampling: DraftSampling | None
) -> list[Children]:
    """Guesses of every head.  All nodes of a level share them, which sampling allows: a walk visits one of them."""
    heads = logits.unbind(1)
    if sampling is None:
        return [likeliest(head, count, draft_ids) for head in heads]
    return [sampling.children(head, level, count, draft_ids) for level, head in enumerate(heads)]


def _with_proposal(draft: Draft, levels: list[Children]) -> Draft:
    """A node at depth ``k`` comes from head ``k``."""
    candidates = stack_candidates(levels, len(draft.tree.token_ids))
    if candidates is None:
        return draft
    index = (draft.tree.depths - 1).masked_fill(draft.tree.token_ids == PADDING, PADDING)
    return replace(draft, proposal=Proposal(index, *candidates))
