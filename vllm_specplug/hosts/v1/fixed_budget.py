"""What the V1 runner and its drafters call on a budget, and the budget that decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch

from vllm_specplug.budget.arms import Arm
from vllm_specplug.types import Draft

#: Runs every drafter of the method.
EVERYTHING = Arm("everything", model=True, model_free=True)


class FixedBudget:
    """Drafts and verifies all that the options allow, and times nothing.

    Its methods are the interface of a budget; ``budgeting.MeasuredBudget`` overrides them.  The runner calls them in
    the order in which they stand here: ``staged`` only for a step with trees, ``propose`` unless the plain arm was
    chosen.  ``wants_model_drafter`` to ``drafted`` are called while ``propose`` runs the drafters.
    """

    #: Whether decisions follow from measured costs.
    is_measured = False

    def prepare(self) -> None:
        """Measure costs at the end of the start-up."""

    # ---- the step

    def begin(self, scheduler_output: Any) -> None:
        """Note that a step begins."""

    def finish(self, request_ids: Collection[str]) -> None:
        """Forget requests that have ended."""

    def staged(self, seconds: float) -> None:
        """Note the seconds for laying out the step's trees."""

    def forward_begins(self) -> None:
        """Note that the target's forward begins."""

    def forward_ends(self) -> None:
        """Note that the logits are computed."""

    def sampled(self, seconds: float) -> None:
        """Note the seconds for choosing the step's tokens: sampling, or walk and commit."""

    def accepted(self, num_tokens: int, num_reqs: int) -> None:
        """Note the drafted tokens that the target accepted in a step of so many requests."""

    # ---- its draft phase

    def plan(self, wanted: np.ndarray) -> Arm:
        """Begin a draft phase: choose the drafters that run.

        Args:
            wanted: bool ``[num_reqs]``; requests that decode in the next step.
        """
        return EVERYTHING

    def propose(self, draft: Callable[[], Draft | None]) -> Draft | None:
        """Call ``draft``, which runs all drafters of the phase."""
        return draft()

    def wants_model_drafter(self, expected: torch.Tensor | None) -> bool:
        """Decide whether the model drafter runs; ``expected`` is the argument of ``DraftContext.draft_by_model``."""
        return True

    def catch_up(self, catch_up: Callable[[], None]) -> None:
        """Call ``catch_up``, by which the model drafter reads the rows that it has missed."""
        catch_up()

    def timed(self, draft_by_model: Callable[[], Draft | None]) -> Draft | None:
        """Call ``draft_by_model``, which runs the model drafter."""
        return draft_by_model()

    def level_floors(self, num_levels: int, num_rows: int) -> list[float]:
        """Return of each level what the values of the nodes that it runs over must sum to, so that it is drafted.

        Args:
            num_levels: levels of the model drafter behind the first one.
            num_rows: rows of each, over all requests.
        """
        return [0.0] * num_levels

    def may_spend(self, seconds: float) -> bool:
        """Decide whether the draft phase may take so many further seconds that a plain step would not take."""
        return True

    def drafted(
        self, first_pass: float, num_rows: int, beams: list[float], level_seconds: list[float], level_rows: int
    ) -> None:
        """Note what a drafter that grows by levels has drafted.

        Args:
            first_pass: seconds of its first forward.
            num_rows: rows of that forward.
            beams: of each further level, the sum that ``level_floors`` is about.
            level_seconds: seconds of each further level.
            level_rows: rows of each further level.
        """

    def select(self, draft: Draft | None, wanted: np.ndarray) -> Draft | None:
        """Return the draft with the nodes to verify; ``wanted`` as in ``plan``."""
        return draft

    def drafts_kept(self, caught_up: bool) -> None:
        """Note that the runner has taken the drafts; ``caught_up``: the model drafter first read missed rows."""

    def may_search(self, seconds: float) -> bool:
        """Decide whether the drafter may take so many seconds to search for better drafts; asked on the first rank."""
        return True

    def searched(self, seconds: float) -> None:
        """Note seconds that the drafter took to search for better drafts."""

    def end_draft(self) -> None:
        """Note that the draft phase has ended."""

    # ---- the end of the step

    def end(self) -> None:
        """Note that the step has ended."""
