"""Matches: earlier positions whose last tokens equal a request's last tokens, and the tokens that follow them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_specplug.proposers.lookup.index import BREAK, RequestIndex, TrafficIndex, match_lengths
from vllm_specplug.proposers.lookup.options import LookupOptions
from vllm_specplug.utils.compiled import compiled

#: Tokens per n-gram of the long chain.  Frequent tokens fill the buckets of the short chain (one token) with bad
#: matches; the long chain still finds the good ones.
LONG_ANCHOR = 3


@dataclass(frozen=True)
class Matches:
    """Continuations of matches, best first: longest match, then own before traffic, then newest.

    Attributes:
        continuations: int32 ``[num_reqs, num_matches, draft_depth]``; ``BREAK`` after the last known token, and where
            there is no match.
        lengths: int64 ``[num_reqs, num_matches]``; matching tokens, 0 where there is no match.
        ages: int64 ``[num_reqs, num_matches]``; tokens stored since the match.
        own: bool ``[num_reqs, num_matches]``; true where the match is in the request itself, false in traffic.
    """

    continuations: np.ndarray
    lengths: np.ndarray
    ages: np.ndarray
    own: np.ndarray


def find_matches(
    index: RequestIndex, traffic: TrafficIndex | None, slots: np.ndarray, options: LookupOptions
) -> Matches:
    """Find the best matches of each request.

    Args:
        index: the requests' own tokens.
        traffic: tokens of ended requests; None where none are kept.
        slots: int64 ``[num_reqs]``; of the requests in ``index``.
        options: of lookup.
    """
    suffixes = index.suffixes(slots, max(options.max_match, LONG_ANCHOR))
    sources = [(index.tokens, chain, slots) for chain in index.chains]
    if traffic is not None:
        sources.append((traffic.tokens, traffic.chain, 0))
    positions = [chain.follow(suffixes, slots, options.max_candidates) for _, chain, slots in sources]
    lengths = [match_lengths(source[0], found, suffixes) for source, found in zip(sources, positions, strict=True)]
    return Matches(
        *_best_matches(
            np.concatenate(positions, axis=1),
            np.concatenate(lengths, axis=1),
            len(index.chains) * options.max_candidates,
            index.tokens,
            index.start(slots) + index.lens[slots] - 1,
            sources[-1][0],
            traffic.cursor if traffic is not None else 0,
            (options.min_match, options.max_match, options.max_candidates, options.draft_depth),
        )
    )


@compiled
def _best_matches(
    positions: np.ndarray,
    lengths: np.ndarray,
    num_own: int,
    tokens: np.ndarray,
    ends: np.ndarray,
    traffic: np.ndarray,
    cursor: int,
    options: tuple[int, int, int, int],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Select the longest matches (ties in the given order) and read the tokens that follow them.

    Args:
        positions: int64 ``[num_reqs, num_positions]``; the first ``num_own`` columns are positions in ``tokens``, the
            others in ``traffic``.
        lengths: int64, like ``positions``; matching tokens of each.
        tokens, traffic: int32; the stores of the requests' own tokens and of ended requests.
        ends: int64 ``[num_reqs]``; position of each request's last token in ``tokens``.
        cursor: last written position of ``traffic``.
        options: ``min_match``, ``max_match``, ``max_candidates`` and ``draft_depth``.

    Returns:
        The fields of ``Matches``.
    """
    num_reqs, num_positions = positions.shape
    min_match, max_match, count, depth = options
    continuations = np.full((num_reqs, count, depth), BREAK, dtype=np.int32)
    best = np.zeros((num_reqs, count), dtype=np.int64)
    ages = np.ones((num_reqs, count), dtype=np.int64)
    own = np.zeros((num_reqs, count), dtype=np.bool_)
    chosen = np.empty(count, dtype=np.int64)
    for request in range(num_reqs):
        end, num_chosen = ends[request], 0
        for k in range(num_positions):
            position, length = positions[request, k], lengths[request, k]
            # The long chain's columns come first: a match of its length in the short chain's columns is a duplicate.
            if k < num_own and (position >= end or (k >= count and length >= LONG_ANCHOR)):
                continue
            length = min(length, max_match)
            if position == 0 or length < min_match or (num_chosen == count and length <= best[request, count - 1]):
                continue
            rank = min(num_chosen, count - 1)
            while rank > 0 and best[request, rank - 1] < length:
                best[request, rank], chosen[rank] = best[request, rank - 1], chosen[rank - 1]
                rank -= 1
            best[request, rank], chosen[rank] = length, k
            num_chosen = min(num_chosen + 1, count)
        for rank in range(num_chosen):
            position = positions[request, chosen[rank]]
            own[request, rank] = chosen[rank] < num_own
            if own[request, rank]:
                age = end - position
                for d in range(depth):  # at the end of the known tokens, a repetition continues from its beginning
                    continuations[request, rank, d] = tokens[position + 1 + d % age]
            else:
                age = (cursor - position) % (len(traffic) - 1)
                for d in range(min(depth, len(traffic) - 1 - position)):
                    continuations[request, rank, d] = traffic[position + 1 + d]
            ages[request, rank] = age
    return continuations, best, ages, own
