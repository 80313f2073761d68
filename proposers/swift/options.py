"""Options of ``{"method": "swift"}``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from vllm_specplug.config import MAX_DRAFT_DEPTH, ConfigError, TreeOptions, require_int, require_number, require_string

from .layer_set import LayerSet
from .search import SearchOptions
from .state import load_state

#: With more sub-layers skipped, the drafts are too inaccurate to be of use.
MAX_SKIP_RATIO = 0.8
#: With fewer skipped, drafting costs as much as decoding.
MIN_SKIP_RATIO = 0.01


@dataclass(frozen=True, kw_only=True)
class SwiftOptions(TreeOptions):
    """Options of SWIFT (sections 4.1 and 4.2, appendix B.2).

    Attributes:
        budget: measured by default: where drafting is not worth its cost, requests decode plainly.
        skip_ratio: share ``r`` of the sub-layers between the first and the last layer that drafting skips.
        draft_depth: most tokens of a chain, one drafting forward each (``N_D``).
        min_confidence: a chain stops after a token whose draft probability is below this (``epsilon``).
        context_window: number of an answer's last tokens on which candidates are scored (``gamma``).
        bayes_every: a Gaussian process selects every so many-th candidate, the others are random (``beta``); 0: all
            are random.
        max_steps: the search ends after this many scored candidates (``S``).
        patience: the search ends after this many scored candidates without a gain.
        goal: the search ends when the matchness exceeds this.
        optimise_share: share of all time for scoring candidates; 0 disables the search.
        max_delay: share of a request's decoding time that it may wait for scoring.
        adapt: search again if the matchness falls after the search has ended.
        streams: search a separate set for each ``swift_stream`` that requests name in their ``extra_args``.
        swift_state: file in which the state of the search is saved; read at start if it exists.
    """

    method: ClassVar[str] = "swift"

    num_speculative_tokens: int = 32
    budget: str = "measured"
    skip_ratio: float = 0.45
    draft_depth: int = 25
    min_confidence: float = 0.8
    context_window: int = 32
    bayes_every: int = 25
    max_steps: int = 1000
    patience: int = 300
    goal: float = 0.95
    optimise_share: float = 0.02
    max_delay: float = 0.1
    adapt: bool = True
    streams: bool = False
    swift_state: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("skip_ratio", self.skip_ratio, MIN_SKIP_RATIO, MAX_SKIP_RATIO)
        require_int("draft_depth", self.draft_depth, 1, MAX_DRAFT_DEPTH)
        require_number("min_confidence", self.min_confidence, 0.0, 1.0)
        require_int("context_window", self.context_window, 4, 512)
        require_int("bayes_every", self.bayes_every, 0, 1000)
        require_int("max_steps", self.max_steps, 1, 1_000_000)
        require_int("patience", self.patience, 1, 1_000_000)
        require_number("goal", self.goal, 0.0, 1.0)
        require_number("optimise_share", self.optimise_share, 0.0, 1.0)
        require_number("max_delay", self.max_delay, 0.0, 1.0)
        for name in ("adapt", "streams"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if self.swift_state is not None:
            require_string("swift_state", self.swift_state)
            if not Path(self.swift_state).absolute().parent.is_dir():
                raise ConfigError(f"swift_state={self.swift_state!r}: create its folder first, or leave the key out")

    def search_options(self, num_layers: int) -> SearchOptions:
        """Return the search options for a target of ``num_layers`` layers."""
        return SearchOptions(
            num_layers, self.skip_ratio, self.bayes_every, self.max_steps, self.patience, self.goal, self.adapt
        )


def check_target(options: SwiftOptions, num_layers: int) -> None:
    """Check the options against the target.

    Raises:
        ConfigError: the target has no sub-layer to skip, or ``swift_state`` is a file of another target.
    """
    if num_layers < 3 or not LayerSet.uniform(num_layers, options.skip_ratio).num_skipped:
        raise ConfigError(
            f"skip_ratio={options.skip_ratio} skips no sub-layer of a target of {num_layers} layers, whose first and "
            "last always run: raise skip_ratio, or serve a target of more layers"
        )
    if options.swift_state is not None and Path(options.swift_state).exists():
        load_state(options.swift_state, options.search_options(num_layers))
