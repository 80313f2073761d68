"""What the runner asks of every drafter that stands in the host's seam."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch


class RoundHooks:
    """Called around every round; a drafter overrides what concerns it."""

    def begin_round(self, wanted: np.ndarray) -> None:
        """The step's tokens are known; ``wanted`` bool ``[num_reqs]`` is false for requests that take no draft."""

    def end_round(self, step_began: float) -> None:
        """The drafts are handed over; ``step_began`` by ``time.perf_counter``."""

    def finish(self, request_ids: Collection[str]) -> None:
        """Forget requests that have ended."""


class CustomDrafter(RoundHooks):
    """Loaded through the host's ``custom_class`` method, which gives it the config only; it has no paged layers."""

    def __init__(self, _vllm_config: Any):
        #: Set by the runner.
        self.runner: Any = None
        #: Attention layers of a draft model: there is none.
        self.draft_layers: dict[str, Any] = {}
        self.path_rows: torch.Tensor | None = None
