"""Lookup on a device: all earlier places of a request at once, tensors of a fixed shape, no look at a value.

The trees are those of ``drafting``, from the same beliefs; where more places match than are drafted, the longest of all
are taken, not of the newest only.  Two things stay behind, since they live on the host: what other requests were
answered, and what is learned while serving (``START`` holds throughout).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import logsigmoid, pad

from vllm_specplug.budget.calibration import LOGIT_LIMIT
from vllm_specplug.core.pool import NEVER, DraftPool
from vllm_specplug.core.pruning import rerank_draft
from vllm_specplug.proposers.lookup.drafting import START
from vllm_specplug.proposers.lookup.options import LookupOptions
from vllm_specplug.types import PADDING, Draft

#: ``match_keys``, or its kernel.
MatchKeys = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, int], torch.Tensor]


def match_keys(
    token_ids: torch.Tensor, slots: torch.Tensor, lens: torch.Tensor, min_match: int, max_match: int
) -> torch.Tensor:
    """How many tokens before and at each place equal the last ones of its request.

    Args:
        token_ids: int32 ``[num_slots, max_len]``; prompt and output of each request.
        slots: int ``[num_reqs]``.
        lens: int32 ``[num_slots]``; valid tokens of each request.
        min_match: fewer are none.
        max_match: more are as good.

    Returns:
        int32 ``[num_reqs, max_len]``; matching tokens ``* max_len + place``, so that the longest match has the largest
        key, of equal ones the newest; 0 where there is no match.
    """
    max_len = token_ids.shape[1]
    tokens, ends = token_ids[slots], lens[slots].long().unsqueeze(1) - 1
    places = torch.arange(max_len, dtype=torch.int32, device=token_ids.device)
    matches = places < ends
    lengths = torch.zeros_like(tokens)
    for back in range(max_match):
        wanted = tokens.gather(1, (ends - back).clamp(min=0))
        matches = matches & (places >= back) & (tokens.roll(back, 1) == wanted)
        lengths += matches
    return (lengths * max_len + places).masked_fill(lengths < min_match, 0)


def make_inputs(lens: Sequence[int], max_len: int, vocab_size: int = 3, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random ``token_ids``, ``slots`` and ``lens`` of ``match_keys``, for tests and timing.

    Of few different tokens, so that much matches; of several requests, the last has one throughout: everything does.
    """
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(0, vocab_size, (len(lens), max_len), dtype=torch.int32, generator=generator)
    if len(lens) > 1:
        token_ids[-1] = 1
    slots = torch.randperm(len(lens), generator=generator)
    return {"token_ids": token_ids, "slots": slots, "lens": torch.tensor(lens, dtype=torch.int32)}


def draft_matches(
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    lens: torch.Tensor,
    root_token_ids: torch.Tensor,
    options: LookupOptions,
    find: MatchKeys = match_keys,
) -> Draft:
    """Draft what followed the longest matches, one tree per request.

    Args:
        token_ids, slots, lens: as in ``match_keys``.
        root_token_ids: int64 ``[num_reqs]``; last emitted tokens.
        options: of lookup.
        find: ``match_keys``.
    """
    max_len = token_ids.shape[1]
    keys = find(token_ids, slots, lens, options.min_match, options.max_match)
    best = keys.topk(min(options.max_candidates, max_len), dim=1).values.long()
    lengths, places = best.div(max_len, rounding_mode="floor"), best % max_len
    ages = (lens[slots].long().unsqueeze(1) - 1 - places).clamp(min=1)
    depths = torch.arange(options.draft_depth, device=token_ids.device).unsqueeze(1)
    # A repetition goes on: behind the end of what is known it starts over.
    ahead = places.unsqueeze(1) + 1 + depths % ages.unsqueeze(1)
    continuations = token_ids[slots.view(-1, 1, 1), ahead.clamp(max=max_len - 1)].long()
    pool = _prefix_tree(continuations, lengths, ages)
    return rerank_draft(pool, root_token_ids, options.num_speculative_tokens)[0]


def _prefix_tree(token_ids: torch.Tensor, lengths: torch.Tensor, ages: torch.Tensor) -> DraftPool:
    """``drafting.build_prefix_tree`` of matches in the request itself, and the values of its nodes.

    Args:
        token_ids: int64 ``[num_reqs, draft_depth, num_matches]``; what followed each match, best match first.
        lengths: int64 ``[num_reqs, num_matches]``; matching tokens, 0 where there is no match.
        ages: int64, like ``lengths``; tokens since the match.
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
    one, match, share, support, age, _ = START["own"]
    log_odds = (
        one
        + match * (lengths.unsqueeze(1) + depths).clamp(1, 64).double().log2()
        + share * torch.log((weight + 1e-3) / ((parent_weight - weight).clamp(min=0.0) + 0.5))
        + support * same.sum(dim=3).clamp(min=1).double().log2()
        + age * (ages.unsqueeze(1) + 1).double().log2() / 10
    )
    edges = logsigmoid(log_odds.clamp(-LOGIT_LIMIT, LOGIT_LIMIT))
    # All continuations through a node share its probability, so that running sums along them agree.
    log_values = edges.gather(2, leaders).cumsum(dim=1).masked_fill(~nodes, NEVER)
    parents = pad(leaders[:, :-1] + depths[:-1] * count, (0, 0, 1, 0), value=PADDING)
    return DraftPool(
        token_ids=token_ids.flatten(1),
        parents=parents.flatten(1),
        log_values=log_values.float().flatten(1),
        depths=(depths + 1).expand_as(token_ids).flatten(1),
        size=depth * count,
    )
