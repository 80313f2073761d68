"""Walk: descend each tree with vLLM's own sampler, one depth at a time.

At its current node a request samples one token exactly as plain decoding does.  If the token is a child of the node,
the walk descends; else it stops, with that token as the bonus.  So the tree only decides how many tokens one forward
yields, never which ones, for all sampling parameters.  (With one-hot drafts this is speculative sampling of EAGLE-2,
section 2.1.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from vllm_specplug.types import PADDING, TokenTree, Walk

#: ``sample(rows [num_reqs], active [num_reqs], depth) -> token ids [num_reqs]``: sample one token per request from
#: the logits of its row.  Requests that are not active must not draw; their result is ignored.
Sample = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class WalkState:
    """A walk in progress.  ``advance`` writes into the output buffers, so that only the newest state is valid.

    Attributes:
        token_ids: int64 ``[num_reqs, num_rows]``; the tree's tokens.
        parents: int64 ``[num_reqs, num_rows]``; the tree's parents, ``PADDING`` for rows that must not match.
        output_token_ids: int32 ``[num_reqs, max_emitted]``; see ``Walk``.
        path_rows: int64 ``[num_reqs, max_emitted]``; see ``Walk``.
        num_emitted: int64 ``[num_reqs]``.
        rows: int64 ``[num_reqs]``; the current node, always a valid row.
        active: bool ``[num_reqs]``; requests that sample at the next depth.
        depth: tokens that active requests have emitted.
    """

    token_ids: torch.Tensor
    parents: torch.Tensor
    output_token_ids: torch.Tensor
    path_rows: torch.Tensor
    num_emitted: torch.Tensor
    rows: torch.Tensor
    active: torch.Tensor
    depth: int


def start(tree: TokenTree, max_emitted: int | None = None, active: torch.Tensor | None = None) -> WalkState:
    """Start a walk at the roots.

    Args:
        tree: the verified trees.
        max_emitted: most tokens to emit; by default ``num_rows``, which no path exceeds.
        active: bool ``[num_reqs]``; requests to walk, by default all.  The others emit nothing.
    """
    num_reqs, width = tree.token_ids.shape
    max_emitted = width if max_emitted is None else max_emitted
    if max_emitted < 1:
        raise ValueError(f"a walk emits at least one token, max_emitted is {max_emitted}")
    path_rows = tree.parents.new_full((num_reqs, max_emitted), PADDING)
    path_rows[:, 0] = 0
    if active is None:
        active = torch.ones(num_reqs, dtype=torch.bool, device=path_rows.device)
    return WalkState(
        token_ids=tree.token_ids,
        # A node may hold PADDING for a token (vLLM's placeholder drafts); it must match nothing.
        parents=tree.parents.masked_fill(tree.token_ids < 0, PADDING),
        output_token_ids=path_rows.new_full((num_reqs, max_emitted), PADDING, dtype=torch.int32),
        path_rows=path_rows,
        num_emitted=path_rows.new_zeros(num_reqs),
        rows=path_rows.new_zeros(num_reqs),
        active=active,
        depth=0,
    )


def current_rows(state: WalkState) -> torch.Tensor:
    """Return the row of each request's current node, int64 ``[num_reqs]``; of stopped requests the last one."""
    return state.rows


def advance(state: WalkState, sampled_token_ids: torch.Tensor) -> WalkState:
    """Emit the tokens sampled at the current rows and descend where they are children.

    Args:
        state: the walk so far.
        sampled_token_ids: int ``[num_reqs]``; anything for requests that are not active.
    """
    depth, active = state.depth, state.active
    state.output_token_ids[:, depth] = sampled_token_ids.masked_fill(~active, PADDING)
    if depth > 0:  # Column 0 is the root's for every request.
        state.path_rows[:, depth] = state.rows.masked_fill(~active, PADDING)
    matches = (state.parents == state.rows.unsqueeze(1)) & (state.token_ids == sampled_token_ids.unsqueeze(1))
    found, child = matches.max(dim=1)  # The first, where siblings repeat a token.
    descends = active & found
    if depth + 1 == state.output_token_ids.shape[1]:
        descends = torch.zeros_like(descends)
    return replace(
        state,
        num_emitted=state.num_emitted + active,
        rows=torch.where(descends, child, state.rows),
        active=descends,
        depth=depth + 1,
    )


def finish(state: WalkState) -> Walk:
    """Return the result of the walk."""
    return Walk(state.output_token_ids, state.path_rows, state.num_emitted)


def walk_exact(
    tree: TokenTree,
    sample: Sample,
    active: torch.Tensor | None = None,
    static_depth: int | None = None,
    max_emitted: int | None = None,
) -> Walk:
    """Walk all trees, sampling only at the nodes visited.

    Args:
        tree: the verified trees.
        sample: the sampler, called once per depth.
        active: bool ``[num_reqs]``; requests to walk, by default all.
        static_depth: a depth that no tree exceeds.  With it the number of iterations is fixed and no value is read
            back.  Without it, on a CPU, the loop also ends once no request is active.
        max_emitted: most tokens to emit; also the width of the result.
    """
    state = start(tree, max_emitted, active)
    num_depths = state.output_token_ids.shape[1]
    if static_depth is not None:
        num_depths = min(num_depths, static_depth + 1)
    sync_is_cheap = static_depth is None and state.active.device.type == "cpu"
    for depth in range(num_depths):
        if sync_is_cheap and not state.active.any():
            break
        state = advance(state, sample(current_rows(state), state.active, depth))
    return finish(state)


def settled_rows(tree: TokenTree, token_ids: torch.Tensor) -> torch.Tensor:
    """Find the row that emits each of the tokens that were chosen before the walk, without reading values back.

    Args:
        tree: the trees.
        token_ids: int64 ``[num_reqs, any width]``; the first tokens to emit; then ``PADDING``.

    Returns:
        int64 ``[num_reqs, num_rows]``; the token to emit at each row; ``PADDING``: it is sampled there.
    """
    num_reqs, width = tree.token_ids.shape
    settled = tree.token_ids.new_full((num_reqs, width + 1), PADDING)  # the last column takes the padding
    rows = tree.token_ids.new_zeros((num_reqs, 1))
    on_path = torch.ones_like(rows, dtype=torch.bool)
    for token in token_ids.unsqueeze(2).unbind(1):
        on_path = on_path & (token >= 0)
        settled.scatter_(1, rows.where(on_path, width), token)
        found, child = ((tree.parents == rows) & (tree.token_ids == token)).max(dim=1, keepdim=True)
        on_path = on_path & found
        rows = child.where(on_path, rows)
    return settled[:, :-1]
