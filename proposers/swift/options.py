"""Options of ``{"method": "swift"}``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from vllm_specplug.config import MAX_DRAFT_DEPTH, ConfigError, TreeOptions, require_int, require_number, require_string

from .layer_set import LayerSet
from .search import SearchOptions
from .state import load_state

#: Draft targets that leave out more than this are of no use.
MAX_SKIP_RATIO = 0.8


@dataclass(frozen=True, kw_only=True)
class SwiftOptions(TreeOptions):
    """Options of SWIFT (sections 4.1 and 4.2, appendix B.2).

    Attributes:
        budget: measured by default: where drafting does not pay, requests decode plainly.
        skip_ratio: share ``r`` of the sub-layers between the first and the last layer that drafting leaves out.
        draft_depth: most tokens of a draft, one forward each (``N_D``).
        min_confidence: drafting stops behind a token in which the drafting model believes less (``epsilon``).
        context_window: last tokens of an answer that candidates are scored on (``gamma``).
        bayes_every: candidates scored between two that a Gaussian process chooses (``beta``); 0: chance alone.
        max_steps: candidates scored until the search ends (``S``).
        patience: the same, since the last gain.
        goal: matchness that ends the search.
        optimise_share: of all time, for scoring candidates; 0 keeps the set as it is.
        max_delay: of the time that a request has been decoding, for the scoring that it waits for.
        adapt: search again where matchness has fallen since the search ended.
        streams: search a set of its own for every ``swift_stream`` that requests name in their ``extra_args``.
        swift_state: file that keeps what was learned; read at start if it exists.
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
        require_number("skip_ratio", self.skip_ratio, 0.0, MAX_SKIP_RATIO)
        if self.skip_ratio == 0:
            raise ConfigError(f"skip_ratio=0 leaves out nothing: choose a share above 0, up to {MAX_SKIP_RATIO}")
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
        """How to search the sets of a target of ``num_layers`` layers."""
        return SearchOptions(
            num_layers, self.skip_ratio, self.bayes_every, self.max_steps, self.patience, self.goal, self.adapt
        )


def check_target(options: SwiftOptions, num_layers: int) -> None:
    """Raise ``ConfigError`` unless a target of ``num_layers`` layers has any to leave out, and ``swift_state`` fits."""
    if num_layers < 3 or not LayerSet.uniform(num_layers, options.skip_ratio).num_skipped:
        raise ConfigError(
            f"skip_ratio={options.skip_ratio} of a target of {num_layers} layers, whose first and last always run, is "
            "not one sub-layer: raise skip_ratio, or use another method"
        )
    if options.swift_state is not None and Path(options.swift_state).exists():
        load_state(options.swift_state, options.search_options(num_layers))
