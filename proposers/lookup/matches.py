"""Matches: earlier positions whose last tokens equal a request's last tokens, and the tokens that follow them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_specplug.cpu.kernels.cpu_ops import call
from vllm_specplug.proposers.lookup.index import RequestIndex, TrafficIndex
from vllm_specplug.proposers.lookup.options import LookupOptions

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
    index: RequestIndex,
    traffic: TrafficIndex | None,
    slots: np.ndarray,
    namespaces: np.ndarray,
    options: LookupOptions,
) -> Matches:
    """Find the best matches of each request.

    Args:
        index: the requests' own tokens.
        traffic: tokens of ended requests; None where none are kept.
        slots: int64 ``[num_reqs]``; of the requests in ``index``.
        namespaces: int64 ``[num_reqs]``; matches in traffic of other namespaces are left out.
        options: of lookup.
    """
    suffixes = index.suffixes(slots, max(options.max_match, LONG_ANCHOR))
    sources = [(index.tokens, chain, slots) for chain in index.chains]
    if traffic is not None:
        sources.append((traffic.tokens, traffic.chain, np.zeros_like(slots)))
    found = [chain.follow(tokens, suffixes, slots, options.max_candidates) for tokens, chain, slots in sources]
    if traffic is not None:
        positions, lengths = found[-1]
        lengths[traffic.namespaces[positions] != namespaces[:, None]] = 0
    positions, lengths = (np.concatenate(part, axis=1) for part in zip(*found, strict=True))
    return Matches(
        *call(
            "lookup_best",
            positions,
            lengths,
            len(index.chains) * options.max_candidates,
            index.tokens,
            index.start(slots) + index.lens[slots] - 1,
            sources[-1][0],
            traffic.cursor if traffic is not None else 0,
            LONG_ANCHOR,
            options.min_match,
            options.max_match,
            options.max_candidates,
            options.draft_depth,
        )
    )
