"""How much of the time the search of layer sets may take: a share in all, and a share of every request's own time."""

from __future__ import annotations

from collections.abc import Collection, Sequence

#: Seconds of trials that may be saved up.
MOST_CREDIT = 2.0


class Ledger:
    """Keeps account of the seconds that requests were served and that trials made them wait.

    Args:
        share: of all time, for trials.
        max_delay: of the time that a request has been decoding, for trials that it waited for.
    """

    def __init__(self, share: float, max_delay: float):
        self.share, self.max_delay = share, max_delay
        self.spent = self.served = 0.0
        self._credit = 0.0
        self._served: dict[str, float] = {}
        self._delayed: dict[str, float] = {}

    def serve(self, request_ids: Sequence[str], seconds: float) -> None:
        """A step for these requests took so long."""
        self.served += seconds
        self._credit = min(self._credit + self.share * seconds, MOST_CREDIT)
        for request_id in request_ids:
            self._served[request_id] = self._served.get(request_id, 0.0) + seconds

    def allows(self, request_ids: Sequence[str], seconds: float) -> bool:
        """Whether a trial of so many seconds may run while these requests wait."""
        return self._credit >= seconds and all(
            self._delayed.get(request_id, 0.0) + seconds <= self.max_delay * self._served.get(request_id, 0.0)
            for request_id in request_ids
        )

    def charge(self, request_ids: Sequence[str], seconds: float) -> None:
        """A trial took so long, and these requests waited for it."""
        self.spent += seconds
        self._credit -= seconds
        for request_id in request_ids:
            self._delayed[request_id] = self._delayed.get(request_id, 0.0) + seconds

    def finish(self, request_ids: Collection[str]) -> None:
        """These requests have ended."""
        for request_id in request_ids:
            self._served.pop(request_id, None)
            self._delayed.pop(request_id, None)
