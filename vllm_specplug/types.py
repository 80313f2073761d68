"""The values that cross stages, and the glossary.

Words, one meaning each:
    vLLM: the engine that this plugin runs in.
    target: the model that is served; its output is what plain vLLM would give.
    drafter: code that proposes draft tokens; with weights (EAGLE, Medusa, SWIFT) or model-free (lookup).
    step: one forward of the target over the batch, with all that belongs to it.  A verification step has draft trees.
    draft level: one forward of the drafter; it drafts the nodes of one depth.
    draft phase: all that the drafter does after one step.
    walk: the pass down the verified trees that selects the accepted paths.
    commit: moving accepted rows' key/value to the slots after the context.
    re-seed: the drafter's forward over the accepted tokens with the target's hidden states (stable KV).
    tau: tokens emitted per verification step and request, the bonus token counted.
    value of a node: estimated probability that the node's whole path is accepted.
    quantise: to round numbers to 8 bits.

Axes:
    num_reqs: requests in the batch.
    num_rows: rows of a request's tree, the root included.  The root, row 0, is the request's last emitted token; its
        key/value is not cached yet.
    num_nodes: drafted nodes, ``num_rows - 1``.
    depth: edges from the root; the root has depth 0.
    context: tokens of a request whose key/value is committed (the root excluded).
    flat row: place of a token in a forward over the whole batch.
    slot: place of a token's key/value in the paged cache.  On the V2 runner also a request's place in its buffers.

All tensors have fixed widths and are padded, so that shapes do not depend on the data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Padding of token ids and row indices.
PADDING = -1


@dataclass(frozen=True)
class TokenTree:
    """Draft trees of a batch, flattened parent-first (any prefix of the rows is a tree).

    Attributes:
        token_ids: int64 ``[num_reqs, num_rows]``; row 0 is the root; padding rows hold ``PADDING``.
        parents: int64 ``[num_reqs, num_rows]``; row index of the parent, always lower than
            the row's own; ``PADDING`` for the root and for padding rows.
        depths: int64 ``[num_reqs, num_rows]``; 0 for the root and for padding rows.
        num_rows: int64 ``[num_reqs]``; valid rows of each request, at least 1.
    """

    token_ids: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    num_rows: torch.Tensor


@dataclass(frozen=True)
class Proposal:
    """The distributions that the nodes of sampled trees were drawn from.

    Attributes:
        index: int64 ``[num_reqs, num_rows]``; the distribution of each node; ``PADDING`` for roots and padding rows.
            Siblings share one and were drawn from it without replacement, in the order of their rows.
        token_ids: int64 ``[num_reqs, num_distributions, num_candidates]``; the tokens that could be drawn.
        probs: float32, like ``token_ids``; their probabilities, which sum to 1.
    """

    index: torch.Tensor
    token_ids: torch.Tensor
    probs: torch.Tensor


@dataclass(frozen=True)
class Draft:
    """Draft trees with their proposer's estimates.

    Attributes:
        tree: the trees.
        log_values: float32 ``[num_reqs, num_rows]``; log of the estimated probability that the row's whole path is
            accepted: 0 for the root, never above the parent's, -inf for padding rows.
        source_names: the proposers whose drafts were merged; empty if there is only one.
        source_bits: int64 ``[num_reqs, num_rows]``; bit ``s`` is set if ``source_names[s]`` drafted the row; 0 for
            the root and padding rows; None without source names.
        proposal: the distributions that the nodes were drawn from; None if they were not sampled.
    """

    tree: TokenTree
    log_values: torch.Tensor
    source_names: tuple[str, ...] = ()
    source_bits: torch.Tensor | None = None
    proposal: Proposal | None = None


@dataclass(frozen=True)
class TreeLayout:
    """Positions and mask of the rows of a tree in one verification forward.

    Attributes:
        positions: int64 ``[num_reqs, num_rows]``; rotary position, context + depth.
        mask: bool ``[num_reqs, num_rows, num_rows]``; ``mask[r, i, j]`` is true where row
            ``i`` attends to row ``j``: its ancestors and itself.  Padding rows attend to nothing.
    """

    positions: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class Walk:
    """The result of walking a batch of trees.

    Attributes:
        output_token_ids: int32 ``[num_reqs, max_emitted]``; tokens emitted (accepted path and
            the bonus token last), padded with ``PADDING``.
        path_rows: int64 ``[num_reqs, max_emitted]``; ``path_rows[r, d]`` is the tree row whose
            logits gave ``output_token_ids[r, d]``; ``path_rows[:, 0] == 0``; then ``PADDING``.
        num_emitted: int64 ``[num_reqs]``; accepted nodes + 1 (0 for a request not sampled).
    """

    output_token_ids: torch.Tensor
    path_rows: torch.Tensor
    num_emitted: torch.Tensor
