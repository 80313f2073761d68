"""Typical acceptance (Medusa, section 2.3.1): lossy, opt in.

A child of an accepted node is accepted if the target's probability p(x) of its token x exceeds a threshold.  The
threshold falls as the entropy H of the target's distribution p grows:

    p(x) > min(epsilon, delta * exp(-H(p)))

The deepest accepted path wins; of equally deep ones, the likeliest.  The token after it is drawn by plain decoding's
sampler.  (The paper takes the likeliest token; sampling keeps the request's temperature in effect where nothing is
accepted.)  If the drawn token is a drafted child, the walk continues exactly from there.  With limits that no draft
passes, the output is therefore plain decoding's.  At temperature 0 the distribution is one token and only the greedy
path passes: the walk is then exact.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_specplug.core.tree import valid_rows
from vllm_specplug.types import PADDING, TokenTree

#: ``log_probs(requests [n], rows [n]) -> float32 [n, vocab]``: the target's next-token distribution at tree rows.
RowLogProbs = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def threshold(log_probs: torch.Tensor, epsilon: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Compute min(epsilon, delta * exp(-H)), with the entropy H in nats.

    Args:
        log_probs: float ``[..., vocab]``; -inf for impossible tokens.
        epsilon, delta: float ``[...]``.
    """
    entropy = torch.special.entr(log_probs.exp()).sum(-1)
    return torch.minimum(epsilon, delta * torch.exp(-entropy))


def accept_typical(
    tree: TokenTree, log_probs: RowLogProbs, epsilon: torch.Tensor, delta: torch.Tensor, active: torch.Tensor
) -> torch.Tensor:
    """Find the accepted path of every tree.

    Only the distributions of accepted nodes with children are requested.

    Args:
        tree: the verified trees.
        log_probs: returns the target's distributions.
        epsilon, delta: float32 ``[num_reqs]``.
        active: bool ``[num_reqs]``; the other requests accept nothing.

    Returns:
        int64 ``[num_reqs]``; row of the last accepted node, 0 (the root) where nothing is accepted.
    """
    num_reqs, width = tree.token_ids.shape
    drafted = valid_rows(tree.num_rows, width) & (tree.token_ids >= 0)
    accepted = torch.zeros_like(drafted)
    accepted[:, 0] = active
    likelihood = torch.zeros(num_reqs, width)
    for depth in range(1, int(tree.depths.max()) + 1):
        reached = drafted & (tree.depths == depth) & accepted.gather(1, tree.parents.clamp(min=0))
        requests, rows = reached.nonzero(as_tuple=True)
        if not rows.numel():
            break
        parents = tree.parents[requests, rows]
        unique_parents, index = (requests * width + parents).unique(return_inverse=True)
        of_request, at_row = unique_parents // width, unique_parents % width
        of_parent = log_probs(of_request, at_row)
        limit = threshold(of_parent, epsilon[of_request], delta[of_request])[index]
        of_child = of_parent[index, tree.token_ids[requests, rows]]
        accepted[requests, rows] = of_child.exp() > limit
        likelihood[requests, rows] = likelihood[requests, parents] + of_child
    return _best_rows(tree, accepted, likelihood)


def accept_typical_nodes(
    tree: TokenTree, child_log_probs: torch.Tensor, limits: torch.Tensor, active: torch.Tensor, max_depth: int
) -> torch.Tensor:
    """Find the accepted path of every tree from the values of all nodes, without reading values back.

    Args:
        tree: the verified trees.
        child_log_probs: float32 ``[num_reqs, num_rows]``; log-probability of each node's token at its parent's row.
        limits: float32 ``[num_reqs, num_rows]``; ``threshold`` at the parent's row.
        active: bool ``[num_reqs]``; the other requests accept nothing.
        max_depth: depth that no tree exceeds.

    Returns:
        As ``accept_typical``, whose result is the same.
    """
    drafted = valid_rows(tree.num_rows, tree.token_ids.shape[1]) & (tree.token_ids >= 0) & (tree.parents >= 0)
    passes, parents = drafted & (child_log_probs.exp() > limits), tree.parents.clamp(min=0)
    accepted = torch.zeros_like(drafted)
    accepted[:, 0] = active
    likelihood = torch.zeros_like(child_log_probs)
    for depth in range(1, max_depth + 1):
        reached = passes & (tree.depths == depth) & accepted.gather(1, parents)
        accepted = accepted | reached
        likelihood = torch.where(reached, likelihood.gather(1, parents) + child_log_probs, likelihood)
    return _best_rows(tree, accepted, likelihood)


def _best_rows(tree: TokenTree, accepted: torch.Tensor, likelihood: torch.Tensor) -> torch.Tensor:
    """Return the deepest accepted row of each tree, of equally deep ones the likeliest; 0 where none is accepted."""
    depths = tree.depths.masked_fill(~accepted, PADDING)
    deepest = depths == depths.amax(dim=1, keepdim=True)
    return likelihood.masked_fill(~(deepest & accepted), float("-inf")).argmax(dim=1)


def path_token_ids(tree: TokenTree, last_rows: torch.Tensor, max_depth: int | None = None) -> torch.Tensor:
    """Collect the tokens of the paths that end in ``last_rows`` (int64 ``[num_reqs]``), in the order of emission.

    Args:
        tree: the trees.
        last_rows: the rows.
        max_depth: at least the greatest depth of these rows; None: it is read from them.

    Returns:
        int64 ``[num_reqs, max(1, max_depth)]``; ``PADDING`` after a path.
    """
    if max_depth is None:
        max_depth = int(tree.depths.gather(1, last_rows.unsqueeze(1)).max())
    longest = max(max_depth, 1)
    tokens = tree.token_ids.new_full((last_rows.shape[0], longest + 1), PADDING)
    requests, rows = torch.arange(last_rows.shape[0], device=last_rows.device), last_rows
    for _ in range(longest):
        # Roots are written to column 0, which is dropped.
        tokens[requests, tree.depths[requests, rows]] = tree.token_ids[requests, rows]
        rows = tree.parents[requests, rows].clamp(min=0)
    return tokens[:, 1:]
