"""Time limits of the search for layer sets: a share of all time, and a share of each request's decoding time."""

from __future__ import annotations

from collections.abc import Collection, Sequence

#: Most seconds of unused trial time that are kept for later.
MAX_CREDIT = 2.0


class Ledger:
    """Sums the seconds in which requests were decoded, and the seconds in which they waited for trials.

    Args:
        share: share of all time that trials may take.
        max_delay: share of a request's decoding time that it may wait for trials.
    """

    def __init__(self, share: float, max_delay: float):
        self.share, self.max_delay = share, max_delay
        self.spent = self.served = 0.0
        self._credit = 0.0
        self._served: dict[str, float] = {}
        self._delayed: dict[str, float] = {}

    def serve(self, request_ids: Sequence[str], seconds: float) -> None:
        """Record a step over these requests."""
        self.served += seconds
        self._credit = min(self._credit + self.share * seconds, MAX_CREDIT)
        for request_id in request_ids:
            self._served[request_id] = self._served.get(request_id, 0.0) + seconds

    def allows(self, request_ids: Sequence[str], seconds: float) -> bool:
        """Return whether a trial of this length may run while these requests wait."""
        return self._credit >= seconds and all(
            self._delayed.get(request_id, 0.0) + seconds <= self.max_delay * self._served.get(request_id, 0.0)
            for request_id in request_ids
        )

    def charge(self, request_ids: Sequence[str], seconds: float) -> None:
        """Record a trial for which these requests waited."""
        self.spent += seconds
        self._credit -= seconds
        for request_id in request_ids:
            self._delayed[request_id] = self._delayed.get(request_id, 0.0) + seconds

    def finish(self, request_ids: Collection[str]) -> None:
        """Forget ended requests."""
        for request_id in request_ids:
            self._served.pop(request_id, None)
            self._delayed.pop(request_id, None)
