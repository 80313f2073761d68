"""What the model drafter reads before it drafts: emitted tokens, prompts, and the tokens of steps that it missed."""

from __future__ import annotations

import numpy as np

from vllm_specplug.budget.costs import CostModel

#: Emitted tokens per request and step before any was seen, and weight of the last step in their mean (a memory of 20
#: steps).  Chosen by hand; not swept.
FIRST_EMITTED, EMITTED_RATE = 1.5, 0.05
#: Steps over which the prompt rows per step are averaged: prompts come seldom.  Without their cost a drafter that lost
#: time on short answers to long prompts kept running.  The number is chosen by hand; not swept.
PROMPT_MEMORY = 128.0
#: Weight of the last catch-up forward in the means of their seconds and of their rows (a memory of 10 forwards).
#: Chosen by hand; not swept.
CATCH_UP_RATE = 0.1


class Reading:
    """Estimates the seconds that the model drafter spends on reading.

    Args:
        costs: of the parts of a step.
        reseeds: whether the drafter reads every emitted token (EAGLE); otherwise it reads the last one only.

    Attributes:
        mean_catch_up: seconds of a catch-up forward.
        prompt_rows_now: prompt rows of this step.
    """

    def __init__(self, costs: CostModel, reseeds: bool):
        self._costs, self._reseeds = costs, reseeds
        self._emitted = FIRST_EMITTED
        self._prompt_rows = 0.0
        self.prompt_rows_now = 0
        self.mean_catch_up = 0.0
        #: float64 ``[2]``; seconds and rows of the last catch-up forwards, with decay.
        self._caught_up = np.zeros(2)

    def saw_emitted(self, tokens: float) -> None:
        """Add the mean number of tokens that a request emitted in a step."""
        self._emitted += EMITTED_RATE * (tokens - self._emitted)

    def saw_prompt(self, num_rows: int) -> None:
        """Add a step that computed so many prompt rows (0 counts too)."""
        self.prompt_rows_now = num_rows
        self._prompt_rows += (num_rows - self._prompt_rows) / PROMPT_MEMORY

    def caught_up(self, seconds: float, num_rows: int) -> None:
        """Add a forward that read ``num_rows`` missed rows."""
        self.mean_catch_up += (CATCH_UP_RATE if self.mean_catch_up else 1.0) * (seconds - self.mean_catch_up)
        self._caught_up = (1 - CATCH_UP_RATE) * self._caught_up + np.array([seconds, num_rows])

    def first_pass_rows(self, num_reqs: int) -> float:
        """Return the expected rows of the drafter's first forward in a step."""
        return num_reqs * (self._emitted if self._reseeds else 1)

    def prompt_seconds(self) -> float:
        """Return the seconds per step for prompts, by the cost of one row among many."""
        if not self._reseeds:
            return 0.0
        table = self._costs["first_pass"]
        few, many = table.knots[(len(table.knots) - 1) // 2], table.knots[-1]
        return self._prompt_rows * (table.at(many) - table.at(few)) / max(many - few, 1)

    def catch_up_seconds(self, missed_rows: int) -> float:
        """Return the seconds for so many missed rows; the cost table ends at fewer rows, so past times count too."""
        seconds, rows = self._caught_up
        return max(self._costs["first_pass"].at(missed_rows), missed_rows * seconds / max(rows, 1.0))
