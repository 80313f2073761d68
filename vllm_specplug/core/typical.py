"""Typical acceptance (Medusa, section 2.3.1; PAPERS.md section 4): lossy, opt in.

A drafted token x behind an accepted node is accepted where the target's probability of it exceeds a threshold that
falls as the target's uncertainty grows:

    p(x) > min(epsilon, delta * exp(-H(p)))

The deepest accepted path wins, of equally deep ones the likeliest.  The token behind it needs no acceptance: plain
decoding's sampler draws it (the paper takes the likeliest token there; sampling keeps what the request's temperature
means where nothing is accepted), and while what it draws is drafted too, the walk goes on exactly.  So limits that
nothing passes give plain decoding's tokens.  At temperature 0 the distribution is one token and only the greedy path
passes: the walk is then exact.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_specplug.core.tree import valid_rows
from vllm_specplug.types import PADDING, TokenTree

#: ``log_probs(requests [n], rows [n]) -> float32 [n, vocab]``: the target's distribution behind tree rows.
RowLogProbs = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def threshold(log_probs: torch.Tensor, epsilon: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """min(epsilon, delta * exp(-H)), H in nats.

    Args:
        log_probs: float ``[..., vocab]``; -inf where a token cannot come.
        epsilon, delta: float ``[...]``.
    """
    entropy = torch.special.entr(log_probs.exp()).sum(-1)
    return torch.minimum(epsilon, delta * torch.exp(-entropy))


def accept_typical(
    tree: TokenTree, log_probs: RowLogProbs, epsilon: torch.Tensor, delta: torch.Tensor, active: torch.Tensor
) -> torch.Tensor:
    """Find the accepted path of every tree, asking for the distributions of accepted nodes with children only.

    Args:
        tree: the verified trees.
        log_probs: the target.
        epsilon, delta: float32 ``[num_reqs]``.
        active: bool ``[num_reqs]``; the others accept nothing.

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
        asked, index = (requests * width + parents).unique(return_inverse=True)
        of_parent = log_probs(asked // width, asked % width)
        limit = threshold(of_parent, epsilon[asked // width], delta[asked // width])[index]
        of_child = of_parent[index, tree.token_ids[requests, rows]]
        accepted[requests, rows] = of_child.exp() > limit
        likelihood[requests, rows] = likelihood[requests, parents] + of_child
    depths = tree.depths.masked_fill(~accepted, PADDING)
    deepest = depths == depths.amax(dim=1, keepdim=True)
    return likelihood.masked_fill(~(deepest & accepted), float("-inf")).argmax(dim=1)


def path_token_ids(tree: TokenTree, last_rows: torch.Tensor) -> torch.Tensor:
    """Tokens of the paths that end in ``last_rows`` (int64 ``[num_reqs]``), in the order of emission.

    Returns:
        int64 ``[num_reqs, max(1, greatest depth)]``; ``PADDING`` behind a path.
    """
    depths = tree.depths.gather(1, last_rows.unsqueeze(1)).squeeze(1)
    longest = max(int(depths.max()), 1)
    tokens = tree.token_ids.new_full((last_rows.shape[0], longest + 1), PADDING)
    requests, rows = torch.arange(last_rows.shape[0]), last_rows
    for _ in range(longest):
        # A root lands in column 0, which holds nothing of interest.
        tokens[requests, tree.depths[requests, rows]] = tree.token_ids[requests, rows]
        rows = tree.parents[requests, rows].clamp(min=0)
    return tokens[:, 1:]
