"""A draft tree from one distribution for each position (DDTree, arXiv 2604.12989).

A drafter that predicts all positions at once does not know which token was taken before a position, so each node of a
position has the same children.  The value of a node is the sum of the log probabilities along its path, and the tree
has the nodes of the highest values.
"""

from __future__ import annotations

import torch

from vllm_specplug.core.growth import deeper_nodes_can_enter, expand, next_beam
from vllm_specplug.core.pool import NEVER, DraftPool
from vllm_specplug.core.pruning import rerank_draft
from vllm_specplug.types import PADDING, Draft


def best_first_tree(
    root_token_ids: torch.Tensor,
    token_ids: torch.Tensor,
    log_probs: torch.Tensor,
    num_nodes: int,
    min_node_value: float = 0.0,
) -> Draft:
    """Build the tree of the best ``num_nodes`` paths; ties go to the shallower node, then to the better ranks.

    A position of which no node can be among them ends the tree: values are read, so the tensors should be on a CPU.

    Args:
        root_token_ids: int64 ``[num_reqs]``; the last emitted tokens.
        token_ids: int64 ``[num_reqs, num_positions, num_candidates]``; different tokens of each position, best first.
        log_probs: float ``[num_reqs, num_positions, num_candidates]``; theirs; -inf means "no candidate".
        num_nodes: most nodes to keep.  With fewer candidates, nodes of further candidates are missing.
        min_node_value: nodes of a lower value (a probability) are not kept.
    """
    num_positions = token_ids.shape[1]
    token_ids, log_probs = token_ids[..., :num_nodes], log_probs[..., :num_nodes]  # a node has all better siblings
    pool = _new_pool(token_ids, num_nodes)
    beam = None
    for position in range(num_positions):
        width = 1 if beam is None else beam.shape[1]
        ids, values = (one[:, position, None].expand(-1, width, -1) for one in (token_ids, log_probs))
        expand(pool, beam, ids, values)
        if position + 1 == num_positions or not deeper_nodes_can_enter(pool, num_nodes).any():
            break
        beam = next_beam(pool, num_nodes)
    return rerank_draft(pool, root_token_ids, num_nodes, min_node_value)[0]


def _new_pool(token_ids: torch.Tensor, num_nodes: int) -> DraftPool:
    """Make a pool for the children of at most ``num_nodes`` nodes of each position."""
    num_reqs, num_positions, num_candidates = token_ids.shape
    size, level = num_candidates, num_candidates
    for _ in range(num_positions - 1):
        level = min(level, num_nodes) * num_candidates
        size += level
    shape, device = (num_reqs, size), token_ids.device
    return DraftPool(
        token_ids=torch.full(shape, PADDING, dtype=torch.int64, device=device),
        parents=torch.full(shape, PADDING, dtype=torch.int64, device=device),
        log_values=torch.full(shape, NEVER, dtype=torch.float32, device=device),
        depths=torch.zeros(shape, dtype=torch.int64, device=device),
    )
