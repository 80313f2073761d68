"""Which arm runs in a step: the one with most expected tokens per second, and bounded trials of the others.

An *arm* is a set of drafters (CPU) or a shape of trees (GPU).  The plain arm drafts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp

#: Share of the time that trials may lose in the long run, the addition to it at the first steps of a batch size, and
#: the number of steps after which 1/e of the addition is left.  Chosen by benchmarks/gpu/budget_simulation.py: a
#: drafter that is worth nothing costs less than 2%.
TRIAL_SHARE, EARLY_SHARE, EARLY_STEPS = 0.003, 0.004, 150.0
#: Most credit for trials, in steps: a long good time must not pay for many trials at once.
MOST_CREDIT = 16.0
#: One in so many steps is plain where the others draft: only a plain step shows its present time.  It loses at most 1%
#: of what drafts gain.
PLAIN_EVERY = 100
#: The 8th and 32nd step of a batch size are plain in any case: the machine may be slower than at the measurement.
EARLY_PLAIN = (8, 32)
#: Factor by which another drafting arm must be faster, so that noise does not change arms.
MARGIN = 1.02
#: Steps over which the time to catch up is spread when an arm with a paused drafter is chosen.
CHOSEN_STEPS = 100


@dataclass(frozen=True)
class Arm:
    """A set of drafters that can run together.

    Attributes:
        name: for people, and in saved files.
        model: whether the model drafter (EAGLE, Medusa, SWIFT) runs.
        model_free: whether the model-free proposers (lookup, unions of it, third-party ones) run.
    """

    name: str
    model: bool
    model_free: bool


PLAIN = Arm("plain", model=False, model_free=False)


@dataclass(frozen=True)
class Outlook:
    """Expected gain of an arm.

    Attributes:
        gain: accepted nodes per request and step.
        cost: plain steps that its step takes beyond one.
    """

    gain: float
    cost: float

    @property
    def speed(self) -> float:
        """Tokens per second, as a multiple of plain decoding."""
        return (1 + self.gain) / (1 + self.cost)


@dataclass
class Regime:
    """Decisions for batches whose number of requests has the same bit length.

    Attributes:
        arm: runs, unless another arm is on trial.
        credit: plain steps that trials may lose.
        steps, since_plain: steps in all, and since the last plain one.
    """

    arm: Arm
    credit: float = 0.0
    steps: int = 0
    since_plain: int = 0


class Planner:
    """Chooses the arm of each step.

    Args:
        first: arm of a batch size that was not seen yet.

    Attributes:
        regime: of the last batch.
        speed: of its arm, as a multiple of plain decoding.
    """

    def __init__(self, first: Arm):
        self._first = first
        self._regimes: dict[int, Regime] = {}
        self.regime, self.speed = Regime(first), 1.0

    def choose(self, num_reqs: int, outlooks: Mapping[Arm, Outlook], catch_up: float = 0.0) -> Arm:
        """Choose the arm of a step.

        Args:
            num_reqs: requests that decode in it.
            outlooks: of the arms that may run.
            catch_up: plain steps that a paused model drafter needs before it can draft.
        """
        regime = self.regime = self._regimes.setdefault(num_reqs.bit_length(), Regime(self._first))
        catch_up = 0.0 if regime.arm.model else catch_up
        self._change_arm(outlooks, catch_up / CHOSEN_STEPS)
        now = outlooks[regime.arm]
        self.speed = max(now.speed, 1.0)
        regime.steps += 1
        regime.since_plain += 1
        share = TRIAL_SHARE + EARLY_SHARE * exp(-regime.steps / EARLY_STEPS)
        regime.credit = min(regime.credit + share * (1 + now.cost), MOST_CREDIT * (1 + now.cost))
        running = self._on_trial(outlooks, catch_up) or regime.arm
        if running is PLAIN:
            regime.since_plain = 0
        return running

    def _change_arm(self, outlooks: Mapping[Arm, Outlook], catch_up: float) -> None:
        """Change the regime's arm where another one is expected to be faster."""
        regime = self.regime
        speeds = {arm: (1 + one.gain) / (1 + one.cost + arm.model * catch_up) for arm, one in outlooks.items()}
        best = max(speeds, key=lambda arm: speeds[arm])
        margin = 1.0 if best is PLAIN else MARGIN
        if regime.arm not in outlooks or speeds[best] > outlooks[regime.arm].speed * margin:
            # Credit saved before does not pay for trials of the arm that was just given up.
            regime.arm, regime.credit = best, 0.0

    def _on_trial(self, outlooks: Mapping[Arm, Outlook], catch_up: float) -> Arm | None:
        """Return the arm to try in this step, if any."""
        regime = self.regime
        if regime.since_plain >= PLAIN_EVERY or regime.steps in EARLY_PLAIN:
            return PLAIN
        others = [arm for arm in outlooks if arm not in (PLAIN, regime.arm)]
        if not others:
            return None
        tried = max(others, key=lambda arm: outlooks[arm].speed)
        one = outlooks[tried]
        loss = 1 + one.cost + catch_up * tried.model - (1 + one.gain) / self.speed
        return tried if self.may_lose(loss) else None

    def may_lose(self, steps: float) -> bool:
        """Return whether a trial may lose so many plain steps, and charge them."""
        if self.regime.credit <= max(steps, 0.0):
            return False
        self.regime.credit -= steps
        return True
