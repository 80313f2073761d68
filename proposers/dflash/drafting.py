"""Growth of a tree from the distributions of all positions, which one forward has predicted."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_specplug.core.draft_sampling import Children
from vllm_specplug.core.growth import TORCH, GrowthOps
from vllm_specplug.proposers.eagle2.drafting import DraftFeatures, grow_tree
from vllm_specplug.types import Draft

#: Nodes of a position that have children, and children of each; EAGLE-2 (Li et al. 2024) uses 10, not measured here.
WIDTH = 10

#: ``children(position, token_ids [R, b], top_k)``: ``[R * b, top_k]``, the children of the nodes before a position.
ChildrenOf = Callable[[int, torch.Tensor, int], Children]


def grow_block(
    root_token_ids: torch.Tensor,
    children: ChildrenOf,
    *,
    num_positions: int,
    num_nodes: int,
    width: int,
    min_node_value: float = 0.0,
    ops: GrowthOps = TORCH,
) -> Draft:
    """Draft a tree of the best paths for each request, by the sum of the log probabilities along each path.

    Args:
        root_token_ids: int64 ``[num_reqs]``; last emitted tokens.
        children: by what the head has predicted.
        num_positions: levels of the tree.
        num_nodes: most nodes to keep.
        width: see ``WIDTH``.
        min_node_value: nodes of a lower value are not kept.
        ops: see ``grow_tree``.
    """
    fed = root_token_ids.unsqueeze(1)

    def score(level: int, _hidden: torch.Tensor, top_k: int) -> Children:
        return children(level, fed, top_k)

    def forward(_level: int, token_ids: torch.Tensor, features: torch.Tensor, _mask: torch.Tensor) -> DraftFeatures:
        nonlocal fed
        fed = token_ids
        return DraftFeatures(features, features)

    nothing = root_token_ids.new_empty(len(root_token_ids), 0)  # there are no further forwards
    return grow_tree(
        root_token_ids,
        DraftFeatures(nothing, nothing),
        score,
        forward,
        num_nodes=num_nodes,
        draft_depth=num_positions,
        draft_top_k=width,
        min_node_value=min_node_value,
        ops=ops,
    )
