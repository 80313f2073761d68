"""Which drafters run in a step: a bandit over the arms, whose trials are limited by the time that they may lose."""

from __future__ import annotations

from collections.abc import Mapping
from math import exp
from typing import Protocol

from vllm_specplug.budget.arms import PLAIN, Arm
from vllm_specplug.budget.forecast import Outlook
from vllm_specplug.budget.lost_time import LostTime
from vllm_specplug.budget.model_drafter import STEPWISE_REQUESTS
from vllm_specplug.budget.reading import Reading
from vllm_specplug.budget.regimes import Regime, Regimes

#: Share of the time that trials of other arms may lose in the long run.  It has to be small beside the goal of at least
#: 0.98x of plain decoding at every load; chosen by hand, not swept (``test_trials_cost_little``: under 1% with what the
#: first steps add).
TRIAL_SHARE = 0.004
#: What the first steps of a regime add to that share, and the steps after which this counts 1/e: little is known at
#: first.  Chosen by hand; not swept.
EARLY_TRIAL_SHARE, EARLY_STEPS = 0.01, 150.0
#: Most credit for trials, in steps: a long good time must not pay for many trials at once.  Chosen by hand; not swept.
MOST_CREDIT = 16
#: One in so many steps is plain where the others draft: only a plain step shows what it costs now.  It limits the loss
#: to 1% of what drafting gains.  Chosen by hand; not swept.
PLAIN_EVERY = 100
#: So many steps draft, whatever is expected of them, before the plain arm may be chosen: the first drafts take up to
#: ten times as long as later ones (measured, commit 28e4019) and would stop drafting.  The number is chosen by hand.
FIRST_DRAFTS = 16
#: The worth of an arm's drafts counts as known from so many requests on, those that its first values count as included.
#: Chosen by hand; not swept.
WORTH_KNOWN = 40.0
#: Factor by which another drafting arm must be faster, so that noise does not change arms.  Chosen by hand; not swept.
MARGIN = 1.02
#: Steps over which the cost of catching up is spread when an arm with a paused drafter is chosen: it is assumed to run
#: at least so long.  Chosen by hand; not swept.
CHOSEN_STEPS = 100


class Outlooks(Protocol):
    """What the planner compares; see ``forecast.Forecast`` and ``shape_budget.ShapeForecast``."""

    def outlooks(self, num_reqs: int) -> Mapping[Arm, Outlook]:
        """Return the outlooks of all arms, the plain one included."""
        ...


class Planner:
    """Chooses the arm of each step.

    Args:
        forecast: what to expect of the arms.
        regimes: what is known by batch size.
        reading: seconds that a paused model drafter needs to catch up; None: none.
        first_drafts: steps that draft before the plain arm may be chosen.

    Attributes:
        trial_share, early_trial_share: see ``TRIAL_SHARE`` and ``EARLY_TRIAL_SHARE``.
        regime: of the last batch.
        running: the arm of this step: the regime's, or another one on trial.
        rate: tokens that a second is worth: those of the last steps of the regime.
        num_reqs: requests that decode in the next step.
        is_held: whether this step is plain only because no time may be lost.
        lost_time: what drafts may lose to plain steps.
    """

    trial_share, early_trial_share = TRIAL_SHARE, EARLY_TRIAL_SHARE

    def __init__(
        self, forecast: Outlooks, regimes: Regimes, reading: Reading | None = None, first_drafts: int = FIRST_DRAFTS
    ):
        self._forecast, self._regimes, self._reading = forecast, regimes, reading
        self._first_drafts = first_drafts
        self.regime: Regime = regimes.of(1)
        self.running: Arm = self.regime.arm
        self.rate = 0.0
        self.num_reqs = 0
        self.is_held = False
        self.lost_time = LostTime()
        self._num_drafts = 0

    def plan(self, num_reqs: int, missed_rows: int = 0) -> Arm:
        """Choose the arm; see ``Budget.plan``."""
        self.num_reqs = num_reqs
        self.is_held = False
        if num_reqs == 0:
            self.running = PLAIN
            return PLAIN
        regime = self.regime = self._regimes.of(num_reqs)
        for value in regime.values.values():
            value.age()
        outlooks = self._forecast.outlooks(num_reqs)
        reads = self._reading is not None and not regime.arm.model
        catch_up = self._reading.catch_up_seconds(missed_rows) if reads else 0.0
        self._choose(outlooks, catch_up)
        now = outlooks[regime.arm]
        self.rate = max(self._rate(now), outlooks[PLAIN].rate)
        regime.steps += 1
        share = self.trial_share + self.early_trial_share * exp(-regime.steps / EARLY_STEPS)
        regime.credit = min(regime.credit + share * now.seconds, MOST_CREDIT * now.seconds)
        regime.since_plain += 1
        self.lost_time.begin_step(outlooks[PLAIN].seconds)
        self.running = self._on_trial(outlooks, catch_up) or regime.arm
        self.is_held = self.running is not PLAIN and not self._may_draft(missed_rows)
        if self.is_held:
            self.running = PLAIN
        if self.running is PLAIN:
            regime.since_plain = 0
            regime.add_step(num_reqs, outlooks[PLAIN].seconds)
        return self.running

    def _rate(self, now: Outlook) -> float:
        """Return the tokens of a second: those of the last steps, or what is expected ``now`` of the regime's arm."""
        tokens, seconds = self.regime.recent
        return tokens / seconds if seconds else now.rate

    def _choose(self, outlooks: Mapping[Arm, Outlook], catch_up: float) -> None:
        """Change the regime's arm where another one is expected to be faster."""
        regime = self.regime
        rates = {
            arm: seen.tokens / (seen.seconds + catch_up * arm.model / CHOSEN_STEPS) for arm, seen in outlooks.items()
        }
        best = max(rates, key=lambda arm: rates[arm])
        too_early = best is PLAIN and self._num_drafts < self._first_drafts
        margin = 1.0 if best is PLAIN else MARGIN
        if rates[best] > outlooks[regime.arm].rate * margin and not too_early:
            # Credit saved before does not pay for trials of the arm that was just given up.
            regime.arm, regime.credit = best, 0.0

    def may_spend(self, seconds: float) -> bool:
        """Return whether the running arm's draft may take so many seconds that a plain step would not take."""
        value = self.regime.values.get(self.running)
        is_known = value is not None and value.requests >= WORTH_KNOWN and self._num_drafts >= self._first_drafts
        return self.lost_time.allows(seconds, is_known)

    def _may_draft(self, missed_rows: int) -> bool:
        """Return whether the running arm's shortest draft may be made."""
        return self.may_spend(self._least_loss(missed_rows))

    def _least_loss(self, missed_rows: int) -> float:
        """Return the seconds that the running arm's shortest draft takes."""
        by_model = 0.0
        # In a small batch with model-free proposers it is decided later whether the model drafter runs.
        if self.running.model and not (self.running.model_free and self.num_reqs <= STEPWISE_REQUESTS):
            by_model = self.least_by_model(missed_rows)
        return by_model + self._forecast.least_loss(self.running, self.num_reqs)

    def least_by_model(self, missed_rows: int) -> float:
        """Return the seconds that the model drafter's shortest draft takes, behind so many rows that it missed."""
        return self._forecast.least_by_model(self.num_reqs) + self._reading.catch_up_seconds(missed_rows)

    def _on_trial(self, outlooks: Mapping[Arm, Outlook], catch_up: float) -> Arm | None:
        """Return the arm to try in this step, if any."""
        regime = self.regime
        if regime.since_plain >= PLAIN_EVERY:
            return PLAIN
        others = [arm for arm in outlooks if arm not in (PLAIN, regime.arm)]
        if not others:
            return None
        tried = max(others, key=lambda arm: outlooks[arm].rate)
        loss = outlooks[tried].seconds + catch_up * tried.model - outlooks[tried].tokens / self.rate
        return tried if regime.credit > max(loss, 0.0) else None

    def add_draft(self, tokens: float, seconds: float) -> None:
        """Add the expected tokens and seconds of a step that drafted; a trial uses up credit."""
        self._num_drafts += 1
        if self.running is not self.regime.arm:
            self.regime.credit -= seconds - tokens / self.rate
        self.regime.add_step(tokens, seconds)
