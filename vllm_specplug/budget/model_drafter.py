"""Whether the model drafter runs beside model-free proposers in a step.

The model drafter adds most where the others expect little.  So the value of the nodes that only it drafted is kept by
classes of what the others' drafts were expected to add, and it runs if that value is worth its time.
"""

from __future__ import annotations

import numpy as np

from vllm_specplug.budget.regimes import FIRST_TIMES, Regime

#: Largest batch (requests) in which this is decided at each step.  In larger ones the planner compares the arms with
#: and without the model drafter.  Deciding at each step there left prompts to catch up with after every pause: unions
#: ran at 0.90x to 0.94x of plain decoding at 4 to 16 requests, where comparing arms lost nothing (commit 391c431).
STEPWISE_REQUESTS = 1
#: Edges of the classes, in expected tokens of the other drafts.  Chosen by hand; not swept.
CLASS_EDGES = np.array([0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0])
#: First tokens gained per request of a class, and the requests that this counts as.  Chosen by hand; not swept.
FIRST_GAIN, FIRST_REQUESTS = 0.6, 8.0
#: Requests after which an old gain counts 1/e.  Chosen by hand; not swept.
GAIN_MEMORY = 1000.0
#: Weight of the last decision in the share of steps with the model drafter.  Chosen by hand; not swept.
SHARE_RATE = 0.02


class ModelDrafterChoice:
    """Decides whether the model drafter runs in a step, and learns what it adds.

    Attributes:
        is_trial: whether it runs in this step although that is expected to lose time.
    """

    def __init__(self) -> None:
        self._first = np.array([FIRST_GAIN * FIRST_REQUESTS, FIRST_REQUESTS])
        #: float64 ``[num_classes, 2]``; tokens that the model drafter added, and requests; with decay.
        self._gains = np.tile(self._first, (len(CLASS_EDGES) + 1, 1))
        #: int ``[num_reqs]``; the class of each request in this step; None if nothing was decided here.
        self._classes: np.ndarray | None = None
        self.is_trial = False

    def begin(self) -> None:
        """Forget the last step's decision."""
        self._classes, self.is_trial = None, False

    def runs(
        self, expected: np.ndarray, wanted: np.ndarray, regime: Regime, rate: float, catch_up_seconds: float
    ) -> bool:
        """Decide whether the model drafter runs.

        Args:
            expected: float ``[num_reqs]``; tokens that the other drafts are expected to add.
            wanted: bool ``[num_reqs]``; requests that decode in the next step.
            regime: of the batch; a trial uses up its credit.
            rate: tokens that a second is worth.
            catch_up_seconds: seconds that the drafter needs later for what it misses now.
        """
        self._classes = np.searchsorted(CLASS_EDGES, expected)
        record = regime.drafter
        if record.seconds is None or record.num_times < FIRST_TIMES:
            return True
        gains = self._gains[self._classes[wanted]]
        loss = record.seconds - float((gains[:, 0] / gains[:, 1]).sum()) / max(rate, 1e-9)
        loss -= catch_up_seconds
        runs = loss < 0
        if not runs and regime.credit > loss:
            regime.credit -= loss
            runs = self.is_trial = True
        record.share += SHARE_RATE * (runs - record.share)
        return runs

    def learn(self, seconds: float, gained: np.ndarray, wanted: np.ndarray, regime: Regime) -> None:
        """Add what the model drafter took and gave in this step.

        Args:
            seconds: that it took.
            gained: float64 ``[num_reqs]``; value of the nodes that only it drafted, less the cost of their rows.
            wanted: bool ``[num_reqs]``; requests that count.
            regime: of the batch.
        """
        if self._classes is None:
            return
        regime.drafter.add(seconds, regime.steps)
        count = int(wanted.sum())
        self._gains += (self._first - self._gains) * (count / GAIN_MEMORY)
        np.add.at(self._gains, self._classes[wanted], np.stack([gained[wanted], np.ones(count)], axis=1))
