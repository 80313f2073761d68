"""What is learned separately for small and large batches, since they draft differently.

A *regime* covers the batches whose number of requests has the same bit length: 1, 2 to 3, 4 to 7, ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp

import numpy as np

from vllm_specplug.budget.arms import FIRST_REQUESTS, SAVED_REQUESTS, Arm, ArmValue

#: Steps over which the speed of a regime is averaged; it decides how many tokens a second is worth.  The steps to come
#: cost about what the last ones did.  With averages over some 50 steps unions changed arms too often; 12 is chosen by
#: hand, not swept.
SPEED_MEMORY = 12.0
#: Of so many first times of the model drafter, the smallest counts: compiling and other programs only add time.  A
#: drafter whose first, slow call counted never ran again.  The number is chosen by hand; not swept.
FIRST_TIMES = 4
#: Steps of the regime after which an old time of the model drafter counts 1/e, so that after a pause the new time
#: counts almost alone.  Chosen by hand; not swept.
TIME_MEMORY = 20.0
#: A time of the model drafter counts as at most so many times the estimate: one disturbed time must do little.  Chosen
#: by hand; not swept.
MOST_AT_ONCE = 2.0


@dataclass
class DrafterRecord:
    """What a regime has seen of the model drafter beside model-free proposers.

    Attributes:
        seconds: of the model drafter in a step; None before it has run.
        num_times: how often that was measured.
        last_step: the regime's step of the last time.
        share: share of the steps in which it runs.
    """

    seconds: float | None = None
    num_times: int = 0
    last_step: int = 0
    share: float = 1.0

    def add(self, seconds: float, step: int) -> None:
        """Add a measured time."""
        known = seconds if self.seconds is None else self.seconds
        if self.num_times < FIRST_TIMES:
            self.seconds = min(known, seconds)
        else:
            weight = 1 - exp(-(step - self.last_step) / TIME_MEMORY)
            self.seconds = known + weight * (min(seconds, MOST_AT_ONCE * known) - known)
        self.num_times, self.last_step = self.num_times + 1, step


@dataclass
class Regime:
    """What is known of batches of about one size.

    Attributes:
        arm: runs, unless another arm is on trial.
        values: of each arm but the plain one.
        credit: seconds that trials may lose.
        steps: steps that were planned.
        since_plain: steps since the last plain one.
        drafter: times of the model drafter beside model-free proposers.
        recent: float64 ``[2]``; tokens and seconds of the last steps, with decay.
    """

    arm: Arm
    values: dict[Arm, ArmValue]
    credit: float = 0.0
    steps: int = 0
    since_plain: int = 0
    drafter: DrafterRecord = field(default_factory=DrafterRecord)
    recent: np.ndarray = field(default_factory=lambda: np.zeros(2))

    def add_step(self, tokens: float, seconds: float) -> None:
        """Add a step's tokens and seconds to the recent ones."""
        self.recent += np.array([tokens, seconds]) - self.recent / SPEED_MEMORY


class Regimes:
    """The regimes seen so far.

    Args:
        arms: all but the plain one, the one with most drafters last.
        max_levels: levels of which the values are kept apart.
        num_nodes: largest number of nodes of a request.
    """

    def __init__(self, arms: Sequence[Arm], max_levels: int, num_nodes: int):
        self._arms, self._max_levels, self._num_nodes = tuple(arms), max_levels, num_nodes
        self._by_size: dict[int, Regime] = {}

    def of(self, num_reqs: int) -> Regime:
        """Return the regime of a batch size; a new one starts from the values of the next smaller one."""
        size = num_reqs.bit_length()
        if size not in self._by_size:
            values = {arm: ArmValue(self._max_levels, self._num_nodes) for arm in self._arms}
            # A smaller batch drafts more, so its values cover fewer nodes and levels too.
            if smaller := [known for known in self._by_size if known < size]:
                for arm, known in self._by_size[max(smaller)].values.items():
                    values[arm].long_run = known.mean()
            self._by_size[size] = Regime(self._arms[-1], values)
        return self._by_size[size]

    def to_json(self) -> dict[str, dict[str, list[list[float]]]]:
        """Return the long-run values of the arms by bit length of the batch size and arm name, for ``remember``."""
        return {
            str(size): {
                arm.name: value.long_run.round(5).tolist()
                for arm, value in regime.values.items()
                if value.requests > FIRST_REQUESTS
            }
            for size, regime in self._by_size.items()
        }

    def remember(self, saved: Mapping[str, Mapping[str, list[list[float]]]]) -> None:
        """Start from the result of ``to_json``; values of another shape are ignored."""
        for size, arms in sorted(saved.items()):
            for arm, value in self.of(2 ** (int(size) - 1)).values.items():
                known = np.asarray(arms.get(arm.name, ()), dtype=np.float64)
                if known.shape == value.long_run.shape:
                    value.long_run, value.requests = known, SAVED_REQUESTS
