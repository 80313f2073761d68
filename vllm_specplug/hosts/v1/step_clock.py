"""When the parts of a step took place, in seconds of ``time.perf_counter``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class StepClock:
    """The times of one step.

    Attributes:
        began, ended: of the step.
        rows: rows of the step; 0 if it computes prompts.
        num_reqs: requests of the step.
        has_drafts: whether there are trees to verify.
        staging: seconds for laying out the trees.
        forward_began, forward_ended: of the target's forward.
        sampling: seconds for choosing the tokens.
        drafting: seconds of the draft phase.
    """

    began: float = 0.0
    rows: int = 0
    num_reqs: int = 0
    has_drafts: bool = False
    staging: float = 0.0
    forward_began: float = 0.0
    forward_ended: float = 0.0
    sampling: float = 0.0
    drafting: float = 0.0
    ended: float = 0.0

    def rest(self) -> float:
        """Return the seconds of the step that belong to no part."""
        known = self.staging + self.forward_ended - self.forward_began + self.sampling + self.drafting
        return self.ended - self.began - known


@dataclass
class DraftClock:
    """The times of one draft phase.

    Attributes:
        began: of the phase.
        wanted: bool ``[num_reqs]``; requests that decode in the next step.
        num_wanted: their number.
        catch_up: seconds for reading missed rows.
        by_model: seconds of the model drafter.
        forwards: of these, seconds of the forwards of a drafter that grows by levels.
        model_free: seconds of the model-free proposers.
    """

    began: float = 0.0
    wanted: np.ndarray | None = None
    num_wanted: int = 0
    catch_up: float = 0.0
    by_model: float = 0.0
    forwards: float = 0.0
    model_free: float = 0.0
