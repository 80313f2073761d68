"""Chooses what to draft and what to verify, so that the batch emits the most tokens per second.

A step over ``num_reqs`` requests emits one token for each; verifying nodes adds the sum of their acceptance
probabilities and costs the seconds that ``costs`` has measured.  All decisions compare expected tokens with seconds:
which drafters run (``planner``, ``model_drafter``), whether one more level is drafted (``growth``), and which drafted
nodes are verified (``selector``).  ``outcomes`` learns from the tokens that the target then chooses.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from vllm_specplug.budget.arms import PLAIN, Arm, best_sums
from vllm_specplug.budget.calibration import LOGIT_LIMIT, Reliability
from vllm_specplug.budget.costs import CostModel
from vllm_specplug.budget.forecast import Forecast
from vllm_specplug.budget.growth import LevelGrowth
from vllm_specplug.budget.lost_time import LostTime
from vllm_specplug.budget.model_drafter import STEPWISE_REQUESTS, ModelDrafterChoice
from vllm_specplug.budget.outcomes import Outcomes, outcomes_of
from vllm_specplug.budget.planner import Planner
from vllm_specplug.budget.reading import Reading
from vllm_specplug.budget.regimes import Regimes
from vllm_specplug.budget.selector import ScoredDraft, Selection, keep_best, node_values
from vllm_specplug.types import Draft

#: The running arm's value is learned at one in so many steps, once so many requests have been seen: its mean hardly
#: changes in between, and learning it costs time at each step.  Chosen by hand; not swept.
VALUE_EVERY, KNOWN_REQUESTS = 4, 150.0
#: Seconds of a draft above so many usual ones are not charged: another program ran, or something was done for the first
#: time.  The costs learn from them, so that they count where they are usual.
DISTURBED = 2.0
#: Smallest factor on the weight of recent values when requests end: new requests may be of another kind, but the
#: drafter stays the same.  Chosen by hand; not swept.
LEAST_KEPT = 0.25


class Budget:
    """Makes the decisions of each step, and learns what came of them.

    Args:
        costs: the cost model, which the caller updates.
        arms: what can run beside plain decoding, the arm with most drafters last.
        num_nodes: largest number of nodes of a request.
        max_levels: levels that the model drafter drafts one by one; 1 if it drafts all at once.
        level_width: nodes of a request that each level but the first runs over.
        max_rows: most rows of a step.
        reseeds: whether the model drafter first reads every emitted token, not just the last one.
        shortest_draft: see ``DraftHooks.shortest_draft``.

    Attributes:
        costs, arms: as given; the plain arm is added.
        regimes: the values of the arms; can be saved.
        reading: the caller adds prompts and catch-up forwards.
    """

    def __init__(
        self,
        costs: CostModel,
        arms: Sequence[Arm],
        *,
        num_nodes: int,
        max_levels: int,
        level_width: int,
        max_rows: int,
        reseeds: bool = True,
        shortest_draft: float | None = None,
    ):
        self.costs, self.arms, self._max_rows = costs, (PLAIN, *arms), max_rows
        # With model-free drafts beside the model drafter's, a node's depth does not tell its level.
        value_levels = max_levels if not any(arm.model_free for arm in arms) else 1
        self.regimes = Regimes(arms, value_levels, num_nodes)
        self.reading = Reading(costs, reseeds)
        self.forecast = Forecast(
            costs,
            self.arms,
            self.regimes,
            self.reading,
            num_nodes=num_nodes,
            level_width=level_width,
            max_rows=max_rows,
            shortest_draft=shortest_draft,
        )
        self.planner = Planner(self.forecast, self.regimes, self.reading)
        self.model_drafter = ModelDrafterChoice()
        self.growth = LevelGrowth(costs, max_levels)
        self.outcomes = Outcomes(len(self.arms))
        self._missed_rows = 0

    # ---- what is known

    @property
    def arm(self) -> Arm:
        """The arm of batches like the last one."""
        return self.planner.regime.arm

    @property
    def running(self) -> Arm:
        """The arm of this step: ``arm``, or another one on trial."""
        return self.planner.running

    @property
    def is_trial(self) -> bool:
        """Whether something runs in this step that does not run at present."""
        return (self.running is not self.arm and not self.planner.is_held) or self.model_drafter.is_trial

    @property
    def reliability(self) -> Reliability:
        """Predicted against observed acceptance."""
        return self.outcomes.reliability

    @property
    def lost_time(self) -> LostTime:
        """The time that drafts may lose to plain steps."""
        return self.planner.lost_time

    def choice(self, num_reqs: int) -> dict[str, Any]:
        """Describe the best choice for so many requests; see ``Forecast.choice``."""
        return self.forecast.choice(num_reqs)

    # ---- before drafting

    def plan(self, num_reqs: int, missed_rows: int = 0) -> Arm:
        """Choose the drafters that run behind this step.

        Args:
            num_reqs: requests that decode in the next step.
            missed_rows: rows that the model drafter would have to read first.
        """
        arm = self.planner.plan(num_reqs, missed_rows)
        if num_reqs:
            self._missed_rows = missed_rows
            self.growth.begin()
            self.model_drafter.begin()
        return arm

    # ---- while drafting

    def wants_model_drafter(self, expected: np.ndarray, wanted: np.ndarray) -> bool:
        """Decide whether the model drafter runs beside the others.

        Args:
            expected: float ``[num_reqs]``; tokens that the others' drafts are expected to add.
            wanted: bool ``[num_reqs]``; requests that decode in the next step.
        """
        planner = self.planner
        if planner.num_reqs > STEPWISE_REQUESTS:
            return True
        if not planner.may_spend(planner.least_by_model(self._missed_rows)):
            return False
        # A drafter that pauses has to catch up later; one that has paused before does so anyway.
        catch_up = 0.0 if self._missed_rows else self.reading.mean_catch_up
        return self.model_drafter.runs(expected, wanted, planner.regime, planner.rate, catch_up)

    def level_floors(self, num_levels: int, num_rows: int) -> list[float]:
        """Return of each level what the values of the nodes that it runs over must sum to, so that it is drafted.

        Args:
            num_levels: levels behind the first one.
            num_rows: rows of each.

        Returns:
            Infinity for levels that would lose more time than may be lost.
        """
        planner, seconds = self.planner, self.costs["level"].at(num_rows)

        def may_follow(level: int) -> bool:
            spent = self.forecast.usual_draft(planner.running, planner.num_reqs, level, self._missed_rows)
            return not math.isfinite(spent) or planner.may_spend(spent + seconds)

        allowed = num_levels
        if num_levels and not may_follow(num_levels):  # a deeper level never comes earlier
            allowed = next(level - 1 for level in range(1, num_levels + 1) if not may_follow(level))
        floors = self.growth.floors(num_levels, planner.rate * seconds)
        return floors[:allowed] + [math.inf] * (num_levels - allowed)

    # ---- after drafting

    def select(
        self,
        draft: Draft,
        request_ids: Sequence[str],
        num_tokens: np.ndarray,
        wanted: np.ndarray,
        draft_seconds: float,
        by_model: float = 0.0,
        by_model_only: np.ndarray | None = None,
    ) -> Draft:
        """Keep the nodes that are worth verifying, over the whole batch.

        Args:
            draft: of all requests.
            request_ids: of the batch.
            num_tokens: int ``[num_reqs]``; tokens that each request has, its root included.
            wanted: bool ``[num_reqs]``; requests that decode in the next step.
            draft_seconds: seconds that the draft has taken.
            by_model: seconds of these for the model drafter; 0 if it did not run.
            by_model_only: bool ``[num_reqs, num_rows]``; nodes that no other drafter has.
        """
        planner, num_reqs, arm = self.planner, max(int(wanted.sum()), 1), self.arms.index(self.running)
        scored = ScoredDraft.of(
            draft, wanted, self.outcomes.records_of(request_ids), self.outcomes.calibration.weights[arm]
        )
        self.outcomes.drafted(request_ids, num_tokens, scored, arm)
        selection = Selection.of(scored, self.costs, num_reqs, planner.rate, self._max_rows)
        self._learn_values(scored, selection.keep, num_reqs)
        if by_model and by_model_only is not None:
            verify = self.costs.verification(num_reqs)
            per_node = planner.rate * (verify[selection.num_nodes] - verify[0]) / max(selection.num_nodes, 1)
            gained = np.where(selection.keep & by_model_only, scored.values - per_node, 0.0).sum(axis=1)
            self.model_drafter.learn(by_model, gained, wanted, planner.regime)
        levels = self.growth.num_levels if by_model else 0
        usual = self.forecast.usual_draft(
            self.running, num_reqs, levels, self._missed_rows + self.reading.prompt_rows_now
        )
        self.lost_time.spend(min(draft_seconds, DISTURBED * usual) + selection.seconds)
        seconds = self.costs.plain_step(num_reqs) + draft_seconds + selection.seconds
        planner.add_draft(num_reqs + selection.value, seconds)
        return selection.apply(draft, scored)

    def _learn_values(self, scored: ScoredDraft, keep: np.ndarray, num_reqs: int) -> None:
        """Learn what the arm's draft and its levels were worth."""
        value = self.planner.regime.values.get(self.running)
        if value is None:
            return
        is_known = value.requests >= KNOWN_REQUESTS and self.running is self.arm
        if is_known and self.outcomes.num_steps % VALUE_EVERY:
            return
        value.learn(scored.values, scored.depths, num_reqs, self.growth.num_levels)
        self.growth.learn(scored.values, keep, scored.depths, num_reqs, self.planner.rate)

    # ---- in the next step

    def learn(self, request_ids: Sequence[str], token_ids: np.ndarray, num_tokens: np.ndarray) -> None:
        """Compare the last draft, verified or not, with the tokens that the target has chosen since.

        Args:
            request_ids: of the batch now.
            token_ids: int ``[num_reqs, max_len]``; tokens of the requests.
            num_tokens: int ``[num_reqs]``; their numbers.
        """
        if emitted := self.outcomes.learn(request_ids, token_ids, num_tokens):
            self.reading.saw_emitted(emitted)

    def finish(self, request_ids: Collection[str]) -> None:
        """Forget requests that have ended; their drafts say little of the requests that take their place."""
        self.outcomes.finish(request_ids)
        for value in self.planner.regime.values.values():
            value.weight *= max(1 - len(request_ids) / max(self.planner.num_reqs, 1), LEAST_KEPT)


def compile_loops() -> None:
    """Compile the loops, or load them from disk: else the first requests would wait for it."""
    rows, one = np.zeros((1, 1), dtype=np.int64), np.ones(1, dtype=np.int64)
    features, nodes, values = node_values(
        rows.astype(np.float32), rows - 1, rows, one, one > 0, np.zeros(1), np.zeros(4), LOGIT_LIMIT
    )
    keep_best(values, nodes, np.zeros(2), 0.0, 1.0, 1)
    best_sums(values, rows, one, 1, 1)
    outcomes_of(rows, rows - 1, features, np.zeros(4), LOGIT_LIMIT, one - 1, one, rows.astype(np.int32), one)
