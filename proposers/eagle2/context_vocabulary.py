"""Drafting of tokens that a request's text has and a reduced draft vocabulary lacks.

Names and rare words often occur again within a text. A head that shares the target's LM head can draft any token, in
its training or not, if it has that token's row. A request drafts only tokens of its own text, never another request's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch

from vllm_specplug.cpu.kernels.extra_logits import extra_logits


@dataclass
class _RequestText:
    """Progress in one request's text, and the text's tokens that are not in the draft vocabulary."""

    num_tokens: int = 0  # tokens that are processed
    ids: dict[int, None] = field(default_factory=dict)  # in the order of their last occurrence


def fair_shares(wanted: Sequence[int], total: int) -> list[int]:
    """Share ``total`` equally; a request that wants less leaves the rest to the others."""
    shares, left = [0] * len(wanted), total
    for rank, index in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        shares[index] = min(wanted[index], left // (len(wanted) - rank))
        left -= shares[index]
    return shares


class ContextVocabulary:
    """Extra rows of the LM head beside a draft vocabulary's, for the requests of a draft phase.

    Args:
        rows: returns rows of the target's LM head: int64 ``[n]`` -> ``[n, hidden_size]``.
        vocab_size: the target's.
        draft_ids: int64 ``[draft_vocab]``; target ids that every request drafts.
        max_extra: most extra tokens of a draft phase, over all its requests.
    """

    def __init__(
        self, rows: Callable[[torch.Tensor], torch.Tensor], vocab_size: int, draft_ids: torch.Tensor, max_extra: int
    ):
        self._rows, self._draft_ids, self._max_extra = rows, draft_ids, max_extra
        self._missing = np.ones(vocab_size, dtype=bool)
        self._missing[draft_ids.numpy()] = False
        self._texts: dict[str, _RequestText] = {}
        self._extra_ids: list[tuple[int, ...]] = []  # of each request of the draft phase
        #: int64 ``[draft_vocab + num_extra]``; target id of each draft id, the extra ones last.
        self.ids = draft_ids
        #: ``[num_extra, hidden_size]``, the extra tokens' rows of the LM head; None if there are no extra tokens.
        self.extra_rows: torch.Tensor | None = None
        #: bool ``[num_reqs, num_extra]``; extra tokens that a request does not draft; None: it drafts all.
        self.other_requests: torch.Tensor | None = None

    def update(self, request_ids: Sequence[str], token_ids: np.ndarray, num_tokens: np.ndarray) -> None:
        """Begin a draft phase of these requests.

        Args:
            request_ids: the requests.
            token_ids: int ``[num_reqs or more, max_len]``; their tokens.
            num_tokens: int ``[num_reqs]``; how many of the tokens are valid.
        """
        texts = []
        for index, (request_id, stop) in enumerate(zip(request_ids, num_tokens.tolist(), strict=True)):
            text = self._texts.setdefault(request_id, _RequestText())
            if stop < text.num_tokens:  # the text was replaced
                text.num_tokens, text.ids = 0, {}
            new = token_ids[index, text.num_tokens : stop]
            text.num_tokens = stop
            for token_id in new[self._missing[new]].tolist():
                text.ids.pop(token_id, None)
                text.ids[token_id] = None
            texts.append(text)
        shares = fair_shares([len(text.ids) for text in texts], self._max_extra)
        extra_ids = [tuple(islice(reversed(text.ids), share)) for text, share in zip(texts, shares, strict=True)]
        if extra_ids != self._extra_ids:
            self._extra_ids = extra_ids
            self._gather(extra_ids)

    def _gather(self, extra_ids: list[tuple[int, ...]]) -> None:
        union = sorted(set().union(*extra_ids))
        if not union:
            self.ids, self.extra_rows, self.other_requests = self._draft_ids, None, None
            return
        union_ids = torch.tensor(union)
        self.ids = torch.cat((self._draft_ids, union_ids))
        self.extra_rows = self._rows(union_ids)
        self.other_requests = None
        if len(extra_ids) > 1:
            column = {token_id: index for index, token_id in enumerate(union)}
            self.other_requests = torch.ones(len(extra_ids), len(union), dtype=torch.bool)
            for index, ids in enumerate(extra_ids):
                self.other_requests[index, [column[token_id] for token_id in ids]] = False

    def extra_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Compute the extra tokens' logits: ``[num_rows, num_extra]``, -inf for tokens of other requests.

        Args:
            hidden: ``[num_rows, hidden_size]``, request-major, with the same number of rows for each request.

        Returns:
            None if there are no extra tokens.
        """
        if self.extra_rows is None:
            return None
        return extra_logits(hidden, self.extra_rows, self.other_requests)

    def finish(self, request_ids: Collection[str]) -> None:
        """Forget requests that have ended."""
        for request_id in request_ids:
            self._texts.pop(request_id, None)
