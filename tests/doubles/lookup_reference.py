"""The reference of ``kernels.triton_lookup``: lookup in torch.

The matches of a request are found in its own tokens by a search over all positions.  Trees and weights are those of
``prefix_tree``; of more matches than ``max_candidates`` the longest of all are drafted, not the longest of the newest.
Matches in traffic are left out here: ``LookupProposer`` is the reference for these.  The feature "request" is 0.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch.nn.functional import logsigmoid, pad

from vllm_specplug.budget.calibration import LOGIT_LIMIT
from vllm_specplug.core.pool import NEVER, DraftPool
from vllm_specplug.core.pruning import rerank_draft
from vllm_specplug.proposers.lookup.device_proposer import LEAST_WEIGHT
from vllm_specplug.proposers.lookup.options import LookupOptions
from vllm_specplug.proposers.lookup.prefix_tree import SCOPES, START_WEIGHTS
from vllm_specplug.types import PADDING, Draft

#: float64 ``[num_scopes, num_features]``, before anything is learned.
UNTAUGHT = np.array([START_WEIGHTS[scope] for scope in SCOPES])

#: Type of ``match_keys`` and of its Triton kernel.
MatchKeys = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, int], torch.Tensor]


def match_keys(
    token_ids: torch.Tensor, slots: torch.Tensor, lens: torch.Tensor, min_match: int, max_match: int
) -> torch.Tensor:
    """Count how many tokens up to and including each position equal the last tokens of the request.

    Args:
        token_ids: int32 ``[num_slots, max_len]``; prompt and output of each request.
        slots: int ``[num_reqs]``; each request's row in ``token_ids`` and ``lens``.
        lens: int32 ``[num_slots]``; number of valid tokens.
        min_match: shorter matches are ignored.
        max_match: longer matches count as this long.

    Returns:
        int32 ``[num_reqs, max_len]``; ``length * max_len + position``: the longest match has the largest key, among
        equally long ones the newest; 0 where there is no match.
    """
    max_len = token_ids.shape[1]
    tokens, ends = token_ids[slots], lens[slots].long().unsqueeze(1) - 1
    positions = torch.arange(max_len, dtype=torch.int32, device=token_ids.device)
    matches = positions < ends
    lengths = torch.zeros_like(tokens)
    for back in range(max_match):
        wanted = tokens.gather(1, (ends - back).clamp(min=0))
        matches = matches & (positions >= back) & (tokens.roll(back, 1) == wanted)
        lengths += matches
    return (lengths * max_len + positions).masked_fill(lengths < min_match, 0)


def draft_matches(
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    lens: torch.Tensor,
    root_token_ids: torch.Tensor,
    options: LookupOptions,
    find: MatchKeys = match_keys,
    weights: np.ndarray = UNTAUGHT,
) -> Draft:
    """Draft the continuations of the longest matches, one tree per request.

    Args:
        token_ids, slots, lens: as in ``match_keys``.
        root_token_ids: int64 ``[num_reqs]``; last emitted tokens.
        options: of lookup.
        find: ``match_keys`` or its kernel.
        weights: of ``MatchLearner.calibration``.
    """
    max_len = token_ids.shape[1]
    keys = find(token_ids, slots, lens, options.min_match, options.max_match)
    best = keys.topk(min(options.max_candidates, max_len), dim=1).values.long()
    pool = prefix_tree(best, token_ids, slots, lens, options.draft_depth, weights)
    return rerank_draft(pool, root_token_ids, options.num_speculative_tokens)[0]


def prefix_tree(
    best: torch.Tensor,
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    lens: torch.Tensor,
    draft_depth: int,
    weights: np.ndarray = UNTAUGHT,
) -> DraftPool:
    """Build the pool of the continuations of matches.

    Args:
        best: int64 ``[num_reqs, num_matches]``; largest keys first.
        token_ids, slots, lens: as in ``match_keys``.
        draft_depth: tokens of a continuation.
        weights: of ``MatchLearner.calibration``.
    """
    max_len = token_ids.shape[1]
    lengths, positions = best.div(max_len, rounding_mode="floor"), best % max_len
    ages = (lens[slots].long().unsqueeze(1) - 1 - positions).clamp(min=1)
    depths = torch.arange(draft_depth, device=token_ids.device).unsqueeze(1)
    # At the end of the known tokens, a repetition continues from its beginning.
    ahead = positions.unsqueeze(1) + 1 + depths % ages.unsqueeze(1)
    continuations = token_ids[slots.view(-1, 1, 1), ahead.clamp(max=max_len - 1)].long()
    return _prefix_tree(continuations, lengths, ages, weights[SCOPES.index("own")])


def _prefix_tree(
    token_ids: torch.Tensor, lengths: torch.Tensor, ages: torch.Tensor, own_weights: np.ndarray
) -> DraftPool:
    """Build the pool of ``prefix_tree.make_pool`` from matches in the request itself.

    Args:
        token_ids: int64 ``[num_reqs, draft_depth, num_matches]``; the continuations, best match first.
        lengths: int64 ``[num_reqs, num_matches]``; matching tokens, 0 where there is no match.
        ages: int64, like ``lengths``; tokens since the match.
        own_weights: float64 ``[num_features]``; of matches in the request itself.
    """
    _, depth, count = token_ids.shape
    depths = torch.arange(depth, device=token_ids.device).unsqueeze(1)
    columns = torch.arange(count, device=token_ids.device)
    exists = (lengths > 0).unsqueeze(1)
    same = (token_ids.unsqueeze(3) == token_ids.unsqueeze(2)) & exists.unsqueeze(3) & exists.unsqueeze(2)
    same = same.long().cumprod(dim=1)
    leaders = same.argmax(dim=3)
    nodes = exists & (leaders == columns)
    weights = torch.exp2((lengths - lengths[:, :1]).double()) * (lengths > 0)
    weight = (same * weights[:, None, None]).sum(dim=3)
    parent_weight = torch.cat([weights.sum(dim=1).view(-1, 1, 1).expand_as(weight[:, :1]), weight[:, :-1]], dim=1)
    one, match, share, support, age, _ = own_weights.tolist()
    log_odds = (
        one
        + match * (lengths.unsqueeze(1) + depths).clamp(1, 64).double().log2()
        + share * torch.log((weight + LEAST_WEIGHT) / ((parent_weight - weight).clamp(min=0.0) + 0.5))
        + support * same.sum(dim=3).clamp(min=1).double().log2()
        + age * (ages.unsqueeze(1) + 1).double().log2() / 10
    )
    edges = logsigmoid(log_odds.clamp(-LOGIT_LIMIT, LOGIT_LIMIT))
    # Each column takes its leaders' log probabilities, so that its cumulative sum is the node's value.
    log_values = edges.gather(2, leaders).cumsum(dim=1).masked_fill(~nodes, NEVER)
    parents = pad(leaders[:, :-1] + depths[:-1] * count, (0, 0, 1, 0), value=PADDING)
    return DraftPool(
        token_ids=token_ids.flatten(1),
        parents=parents.flatten(1),
        log_values=log_values.float().flatten(1),
        depths=(depths + 1).expand_as(token_ids).flatten(1),
        size=depth * count,
    )
