"""The budget of the V1 runner: it decides at each step what is drafted and verified."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch

from vllm_specplug.budget.arms import PLAIN, Arm
from vllm_specplug.budget.budget import Budget, compile_loops
from vllm_specplug.budget.cost_files import load, save
from vllm_specplug.budget.costs import CostModel
from vllm_specplug.config import TreeOptions, model_drafter
from vllm_specplug.hosts.ranks import agreed, leads
from vllm_specplug.hosts.v1.cost_measurement import CostMeasurement
from vllm_specplug.hosts.v1.fixed_budget import FixedBudget
from vllm_specplug.hosts.v1.step_clock import DraftClock, StepClock
from vllm_specplug.proposer import find_method
from vllm_specplug.types import Draft

logger = logging.getLogger("vllm_specplug")

#: The first so many observations of a part are learned from one by one, later ones by means: learning costs time.
#: Chosen by hand; not swept.
EAGER = 40
#: The same for the first so many steps of a regime of batch sizes.  Chosen by hand; not swept.
FIRST_STEPS = 24
#: Steps after which the cost model is saved again.  Chosen by hand.
SAVE_EVERY = 2000


def serving_budget(runner: Any, options: TreeOptions) -> FixedBudget:
    """Return the budget that the options ask for: fixed or measured."""
    if options.budget == "fixed":
        return FixedBudget()
    return MeasuredBudget(runner, options) if leads() else FollowingBudget(runner, options)


class MeasuredBudget(FixedBudget):
    """Times the parts of each step, keeps the cost model, and queries ``Budget`` for decisions.

    With several tensor-parallel ranks it runs on the first one, and its decisions are those of all ranks: their clocks
    differ, and every rank takes part in a drafter's forward.

    Args:
        runner: the V1 model runner, with its drafter.
        options: of the method.

    Attributes:
        facts: what the costs depend on; they name the saved file.
    """

    is_measured = True

    def __init__(self, runner: Any, options: TreeOptions):
        self._runner, self._options = runner, options
        self._drafter_options = model_drafter(options)
        self._measurement = CostMeasurement(runner, options)
        self.facts = self._measurement.facts()
        self._budget: Budget | None = None
        self._clock = StepClock()
        self._phase = DraftClock()
        self._steps = 0
        #: Steps that were timed, by the bit length of the number of requests.
        self._steps_of: Counter[int] = Counter()

    # ---- the cost model

    @property
    def budget(self) -> Budget:
        """The budget; made from the saved cost model, if any, at the first use."""
        if self._budget is None:
            self._budget = self._make(load(self.facts) or {})
        return self._budget

    def prepare(self) -> None:
        """Load the saved cost model, or measure one."""
        compile_loops()
        if self._budget is None and (saved := load(self.facts)) is not None:
            self._budget = self._make(saved)
        if agreed(self._budget is None):
            self.measure()
        self._measurement.warm_up()

    def measure(self) -> None:
        """Measure the costs in some seconds, and save them."""
        costs = CostModel(self._measurement.measure(), self._measurement.limits)
        self._budget = self._make({"seconds": costs.to_json()})
        self.save()

    def _make(self, saved: dict[str, Any], costs: CostModel | None = None) -> Budget:
        options, drafter, by_level = self._options, self._drafter_options, self._runner.drafter.grows_by_level
        if costs is None:
            seconds = saved.get("seconds", {})
            measured, per_term = CostModel.measured_in(seconds), CostModel.terms_in(seconds)
            costs = CostModel(measured, self._measurement.limits, per_term)
        budget = Budget(
            costs,
            self._arms(),
            num_nodes=options.num_speculative_tokens,
            max_levels=drafter.draft_depth if by_level else 1,
            level_width=drafter.draft_top_k if by_level else 1,
            max_rows=self._measurement.limits["rows"],
            reseeds=by_level,
            shortest_draft=self._runner.drafter.shortest_draft,
        )
        budget.regimes.remember(saved.get("worth", {}))
        return budget

    def _arms(self) -> list[Arm]:
        options, has_drafter = self._options, self._drafter_options is not None
        is_model_free = find_method(options.method).make is not None
        arm = Arm(options.method, model=has_drafter or not is_model_free, model_free=is_model_free)
        if is_model_free and has_drafter and len(options.sources) > 1:
            return [Arm("without the drafter", model=False, model_free=True), arm]
        return [arm]

    def restart(self) -> None:
        """Forget the values of drafts; costs are kept."""
        self._budget = self._make({}, self.budget.costs)

    def report(self, batches: list[int]) -> dict[str, Any]:
        """Return costs, reliability, and the choices for batches of these sizes."""
        choices = [self.budget.choice(batch) for batch in batches]
        return {
            "seconds": self.budget.costs.to_json(),
            "reliability": self.budget.reliability.curve(),
            "choices": choices,
        }

    def save(self) -> None:
        """Write costs and values to the user's cache."""
        budget = self.budget
        save(self.facts, budget.costs, worth=budget.regimes.to_json(), reliability=budget.reliability.curve())

    # ---- the step

    def finish(self, request_ids: Collection[str]) -> None:
        self.budget.finish(request_ids)

    def begin(self, scheduler_output: Any) -> None:
        now, last = time.perf_counter(), self._clock
        scheduled, drafts = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens
        rows = scheduler_output.total_num_scheduled_tokens
        continues = bool(scheduled) and not scheduler_output.scheduled_new_reqs
        # The costs are those of steps that only decode; a step with prompt rows is not timed.
        decodes = continues and rows == len(scheduled) + sum(map(len, drafts.values()))
        if continues and last.rows:
            self.observe("between_steps", last.num_reqs, now - last.ended + last.rest())
        self.budget.reading.saw_prompt(0 if decodes else rows)
        self._clock = StepClock(now, rows if decodes else 0, len(scheduled), bool(drafts))

    def staged(self, seconds: float) -> None:
        self._clock.staging = seconds

    def forward_begins(self) -> None:
        self._clock.forward_began = time.perf_counter()

    def forward_ends(self) -> None:
        self._clock.forward_ended = time.perf_counter()

    def sampled(self, seconds: float) -> None:
        self._clock.sampling = seconds

    def end(self) -> None:
        clock = self._clock
        clock.ended = time.perf_counter()
        if clock.rows and clock.forward_began:
            # A plain step among steps that draft, or the other way round, is rare: each one is learned from at once.
            usual = PLAIN if self.budget.planner.is_held else self.budget.arm
            is_rare = clock.has_drafts == (usual is PLAIN)
            seconds = clock.forward_ended - clock.forward_began
            nodes = clock.rows - clock.num_reqs
            terms = {"requests": clock.num_reqs - 1, "nodes": nodes, "trees": nodes > 0}
            self.observe("verify", clock.rows, seconds, is_rare, **terms)
            self._steps_of[clock.num_reqs.bit_length()] += 1
            part = "tree" if clock.has_drafts else "sample"
            self.observe(part, clock.num_reqs, clock.staging + clock.sampling, is_rare)
        self._steps += 1
        if self._steps % SAVE_EVERY == 0:
            self.save()
            logger.info(
                "vllm-specplug: budget: runs %s, calibration error %.3f; (outcomes, predicted, accepted): %s",
                self.budget.arm.name,
                self.budget.reliability.error(),
                ", ".join(f"({n:.0f}, {p:.2f}, {y:.2f})" for n, p, y in self.budget.reliability.curve()),
            )

    def observe(self, part: str, count: int, seconds: float, is_rare: bool | None = None, **terms: float) -> None:
        """Learn the cost of a part.

        Args:
            part, count, seconds, terms: see ``CostModel.observe``.
            is_rare: whether the part seldom runs at present; by default, whether the step is a trial.
        """
        costs = self.budget.costs
        is_rare = self.budget.is_trial if is_rare is None else is_rare
        size = self._clock.num_reqs.bit_length()
        if is_rare or costs[part].observations < EAGER or self._steps_of[size] < FIRST_STEPS:
            costs.observe(part, count, seconds, self._steps, **terms)
        else:
            costs.gather(part, count, seconds, self._steps, (size, bool(terms.get("trees"))), **terms)

    def accepted(self, num_tokens: int, num_reqs: int) -> None:
        self.budget.lost_time.accept(num_tokens, num_reqs)

    # ---- the draft phase

    def plan(self, wanted: np.ndarray) -> Arm:
        self._phase = DraftClock(time.perf_counter(), wanted, int(wanted.sum()))
        batch = self._runner.input_batch
        self.budget.learn(batch.req_ids, batch.token_ids_cpu, batch.num_tokens_no_spec[: batch.num_reqs])
        return agreed(self.budget.plan(self._phase.num_wanted, self._runner.drafter.missed.num_rows))

    def propose(self, draft: Callable[[], Draft | None]) -> Draft | None:
        begin, phase = time.perf_counter(), self._phase
        try:
            return draft()
        finally:
            if self.budget.running.model_free:
                phase.model_free = time.perf_counter() - begin - phase.by_model - phase.catch_up
                self.observe("model_free", phase.num_wanted, phase.model_free)

    def wants_model_drafter(self, expected: torch.Tensor | None) -> bool:
        return agreed(expected is None or self.budget.wants_model_drafter(expected.numpy(), self._phase.wanted))

    def catch_up(self, catch_up: Callable[[], None]) -> None:
        missed = self._runner.drafter.missed
        begin, num_rows = time.perf_counter(), missed.num_rows
        catch_up()
        self._phase.catch_up = time.perf_counter() - begin
        self.budget.reading.caught_up(self._phase.catch_up, num_rows - missed.num_rows)

    def timed(self, draft_by_model: Callable[[], Draft | None]) -> Draft | None:
        begin = time.perf_counter()
        try:
            return draft_by_model()
        finally:
            self._phase.by_model = time.perf_counter() - begin
            if not self._runner.drafter.grows_by_level:  # else ``drafted`` observes the forwards
                self.observe("first_pass", self._phase.num_wanted, self._phase.by_model)

    def level_floors(self, num_levels: int, num_rows: int) -> list[float]:
        return agreed(self.budget.level_floors(num_levels, num_rows))

    def may_spend(self, seconds: float) -> bool:
        return agreed(self.budget.planner.may_spend(time.perf_counter() - self._phase.began + seconds))

    def drafted(
        self, first_pass: float, num_rows: int, beams: list[float], level_seconds: list[float], level_rows: int
    ) -> None:
        self.budget.growth.beams = beams
        self._phase.forwards = first_pass + sum(level_seconds)
        self.observe("first_pass", num_rows, first_pass)
        if level_seconds:
            self.observe("level", level_rows, sum(level_seconds) / len(level_seconds))

    def select(self, draft: Draft | None, wanted: np.ndarray) -> Draft | None:
        seconds = time.perf_counter() - self._phase.began
        if draft is None:
            if self.budget.running is not PLAIN:
                self.budget.lost_time.spend(seconds)
            return None
        batch = self._runner.input_batch
        num_tokens = batch.num_tokens_no_spec[: batch.num_reqs]
        return self.budget.select(
            draft, batch.req_ids, num_tokens, wanted, seconds, self._phase.by_model, self._by_model_only(draft)
        )

    def _by_model_only(self, draft: Draft) -> np.ndarray | None:
        """Return the nodes that only the model drafter has, bool ``[num_reqs, num_rows]``; None if it is no source."""
        names, drafter = draft.source_names, self._drafter_options
        if names is None or drafter is None or drafter.method not in names:
            return None
        return draft.source_bits.numpy() == 1 << names.index(drafter.method)

    def drafts_kept(self, caught_up: bool) -> None:
        phase = self._phase
        if self.budget.running is not PLAIN and not caught_up:
            by_model = phase.forwards if self._runner.drafter.grows_by_level else phase.by_model
            rest = time.perf_counter() - phase.began - by_model - phase.model_free
            self.observe("draft_overhead", phase.num_wanted, rest)

    def may_search(self, seconds: float) -> bool:
        return self.budget.lost_time.allows(seconds)

    def searched(self, seconds: float) -> None:
        self.budget.lost_time.spend(seconds)

    def end_draft(self) -> None:
        self._clock.drafting = time.perf_counter() - self._phase.began


class FollowingBudget(FixedBudget):
    """Does on a further tensor-parallel rank what the first rank's ``MeasuredBudget`` decides.

    What is selected for verification needs no agreement: the scheduler sends the first rank's trees to all.
    """

    is_measured = True

    def __init__(self, runner: Any, options: TreeOptions):
        self._measurement = CostMeasurement(runner, options)
        self.facts = self._measurement.facts()

    def prepare(self) -> None:
        if agreed(None):
            self.measure()
        self._measurement.warm_up()

    def measure(self) -> None:
        """Take part in the forwards that the first rank times."""
        self._measurement.measure()

    def restart(self) -> None:
        """Nothing is learned here."""

    def report(self, batches: list[int]) -> dict[str, Any]:
        """Nothing is known here."""
        return {}

    def plan(self, wanted: np.ndarray) -> Arm:
        arm = agreed(None)
        return PLAIN if arm == PLAIN else arm

    def wants_model_drafter(self, expected: torch.Tensor | None) -> bool:
        return agreed(None)

    def level_floors(self, num_levels: int, num_rows: int) -> list[float]:
        return agreed(None)

    def may_spend(self, seconds: float) -> bool:
        return agreed(None)
