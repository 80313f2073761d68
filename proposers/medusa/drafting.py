"""From the heads' logits to one draft tree per request: a fixed sparse shape, or a shape chosen per context."""

from __future__ import annotations

import torch

from vllm_specplug.tree import expand, new_pool, next_beam, rerank_draft, static_tree
from vllm_specplug.types import Draft

from .sparse_tree import Paths, parents_of


def fill_tree(
    root_token_ids: torch.Tensor, logits: torch.Tensor, draft_ids: torch.Tensor | None, paths: Paths
) -> Draft:
    """Fill a fixed shape: the node ``(..., i)`` at depth ``k`` holds the ``i``-th best token of head ``k``.

    Args:
        root_token_ids: int64 ``[num_reqs]``; last emitted tokens.
        logits: float ``[num_reqs, num_heads, draft_vocab]``.
        draft_ids: int64 ``[draft_vocab]``; target id of each draft id; None: the target's vocabulary.
        paths: the shape, no deeper than there are heads.
    """
    ranks = max(max(path) for path in paths) + 1
    log_probs, best = torch.log_softmax(logits, dim=-1, dtype=torch.float32).topk(ranks, dim=-1)
    heads = torch.tensor([len(path) - 1 for path in paths])
    last = torch.tensor([path[-1] for path in paths])
    parents = parents_of(paths)
    tree = static_tree(root_token_ids, _to_target(best, draft_ids)[:, heads, last], parents)
    log_values = [log_probs.new_zeros(log_probs.shape[0])]
    for parent, own in zip(parents, log_probs[:, heads, last].unbind(1), strict=True):
        log_values.append(log_values[parent] + own)
    return Draft(tree, torch.stack(log_values, dim=1))


def choose_tree(
    root_token_ids: torch.Tensor,
    logits: torch.Tensor,
    draft_ids: torch.Tensor | None,
    *,
    num_nodes: int,
    draft_top_k: int,
) -> Draft:
    """Keep the ``num_nodes`` combinations with the largest product of head probabilities.

    Args:
        root_token_ids, logits, draft_ids: as in ``fill_tree``.
        num_nodes: nodes to keep.
        draft_top_k: guesses per head, and nodes extended per level.
    """
    num_reqs, num_heads, _ = logits.shape
    log_probs, best = torch.log_softmax(logits, dim=-1, dtype=torch.float32).topk(draft_top_k, dim=-1)
    token_ids = _to_target(best, draft_ids)
    pool = new_pool(num_reqs, draft_top_k, num_heads, logits.device)
    expand(pool, None, token_ids[:, :1], log_probs[:, :1])
    for head in range(1, num_heads):
        # A head knows nothing of the path before it: all nodes of a level have the same children.
        beam = next_beam(pool, draft_top_k)
        shape = (num_reqs, beam.shape[1], draft_top_k)
        expand(pool, beam, token_ids[:, head : head + 1].expand(shape), log_probs[:, head : head + 1].expand(shape))
    return rerank_draft(pool, root_token_ids, num_nodes)[0]


def _to_target(token_ids: torch.Tensor, draft_ids: torch.Tensor | None) -> torch.Tensor:
    return token_ids if draft_ids is None else draft_ids[token_ids]
