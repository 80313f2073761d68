"""The tokens that requests' own texts hold and a reduced draft vocabulary lacks: drafted as well.

Names and rare words come back within a text.  A head that shares the target's LM head can draft any token whose row it
is given, seen in its training or not.  A request is given the rows of its own tokens only, never another's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

#: The most such tokens of a round, over all its requests; each request has an equal share for its latest.
MOST_IDS = 512


@dataclass
class _Seen:
    """Of one request: how many of its tokens were looked at, and those that are not in the draft vocabulary."""

    tokens: int = 0
    ids: dict[int, None] = field(default_factory=dict)  # in the order in which they came last


class ContextVocabulary:
    """Rows of the LM head beside a draft vocabulary's, for the requests of a round.

    Args:
        lm_head: ``[vocab, hidden_size]``, the target's; kept as it is.
        draft_ids: int64 ``[draft_vocab]``; target ids that are always drafted.
    """

    def __init__(self, lm_head: torch.Tensor, draft_ids: torch.Tensor):
        self._lm_head, self._draft_ids = lm_head, draft_ids
        self._missing = np.ones(len(lm_head), dtype=bool)
        self._missing[draft_ids.numpy()] = False
        self._seen: dict[str, _Seen] = {}
        self._of: list[tuple[int, ...]] = []
        #: int64 ``[draft_vocab + num_more]``; target id of every column of ``extend``.
        self.ids = draft_ids
        self._rows: torch.Tensor | None = None
        self._foreign: torch.Tensor | None = None

    def look(self, request_ids: Sequence[str], token_ids: np.ndarray, num_tokens: np.ndarray) -> None:
        """A round of these requests begins.

        Args:
            request_ids: of the round.
            token_ids: int ``[num_reqs or more, max_len]``; their tokens.
            num_tokens: int ``[num_reqs]``; how many of them are known.
        """
        share = MOST_IDS // max(len(request_ids), 1)
        of = []
        for place, (request_id, stop) in enumerate(zip(request_ids, num_tokens.tolist(), strict=True)):
            seen = self._seen.setdefault(request_id, _Seen())
            if stop < seen.tokens:  # its tokens are others now
                seen.tokens, seen.ids = 0, {}
            new = token_ids[place, seen.tokens : stop]
            seen.tokens = stop
            for token_id in new[self._missing[new]].tolist():
                seen.ids.pop(token_id, None)
                seen.ids[token_id] = None
            of.append(tuple(seen.ids)[-share:] if share else ())
        if of != self._of:
            self._of = of
            self._gather(of)

    def _gather(self, of: list[tuple[int, ...]]) -> None:
        more = sorted(set().union(*of))
        if not more:
            self.ids, self._rows, self._foreign = self._draft_ids, None, None
            return
        more_ids = torch.tensor(more)
        self.ids = torch.cat((self._draft_ids, more_ids))
        self._rows = self._lm_head[more_ids]
        self._foreign = None
        if len(of) > 1:
            column = {token_id: place for place, token_id in enumerate(more)}
            self._foreign = torch.ones(len(of), len(more), dtype=torch.bool)
            for place, ids in enumerate(of):
                self._foreign[place, [column[token_id] for token_id in ids]] = False

    def extend(self, logits: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of ``ids``; -inf for tokens of other requests.

        Args:
            logits: ``[num_rows, draft_vocab]``, request-major, as many rows of each request.
            hidden: ``[num_rows, hidden_size]`` that they came from.
        """
        if self._rows is None:
            return logits
        more = hidden @ self._rows.T
        if self._foreign is not None:
            width = len(hidden) // len(self._foreign)
            more = more.masked_fill_(self._foreign.repeat_interleave(width, dim=0), float("-inf"))
        return torch.cat((logits, more), dim=1)

    def finish(self, request_ids: Collection[str]) -> None:
        """Forget requests that have ended."""
        for request_id in request_ids:
            self._seen.pop(request_id, None)
