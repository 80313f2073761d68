"""The time that drafting may lose to plain decoding: a share of the serving time and a small first credit.

What a measured method tries at first (drafts whose worth is not known, other arms, a search for layer sets) takes time
that plain steps would not take.  Each draft is charged when it is made, and the tokens that it gains pay it back.  So
a drafter that pays earns its next draft with the last one, and one that does not pay stops when the time is used up.
Until more is earned, steps are plain.
"""

from __future__ import annotations

#: Share of the serving time that may be lost.  Chosen with ``FIRST_STEPS``: at most 2% of the first 100 steps.
SHARE = 0.01
#: Plain steps that may be lost before anything was served.
FIRST_STEPS = 1.0
#: Most plain steps that are kept for later, and that a drafter whose worth is known may owe: drafts that pay on average
#: lose time now and then.  Chosen by hand; not swept.
MOST_STEPS = 16.0


class LostTime:
    """Counts seconds lost to plain decoding against the seconds that may be lost.

    Attributes:
        left: seconds that may still be lost; below 0 if more was lost.
    """

    def __init__(self) -> None:
        self.left = 0.0
        self._plain_step: float | None = None

    def begin_step(self, plain_step: float) -> None:
        """Add what a step earns; ``plain_step`` is the seconds of a plain step of the same batch."""
        if self._plain_step is None:
            self.left = FIRST_STEPS * plain_step
        self._plain_step = plain_step
        self.gain(SHARE * plain_step)

    def spend(self, seconds: float) -> None:
        """Add seconds that a plain step would not have taken."""
        self.left -= seconds

    def gain(self, seconds: float) -> None:
        """Add seconds that were saved, or earned."""
        self.left = max(min(self.left + seconds, MOST_STEPS * (self._plain_step or 0.0)), self.left)

    def accept(self, num_tokens: float, num_reqs: int) -> None:
        """Add drafted tokens that the target accepted, in a step of so many requests: plain steps give as many."""
        self.gain(num_tokens * (self._plain_step or 0.0) / max(num_reqs, 1))

    def allows(self, seconds: float, is_known: bool = False) -> bool:
        """Return whether so many seconds may be spent; ``is_known``: on drafts that were seen to pay before."""
        return self.left - seconds >= -is_known * MOST_STEPS * (self._plain_step or 0.0)
