"""Options of ``{"method": "swift"}``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from vllm_specplug.config import ConfigError, TreeOptions, require_number, require_string

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
        min_confidence: a chain stops after a token whose draft probability is below this (``epsilon``).
        optimise_share: share of all time for scoring candidates; 0 disables the search.
        swift_state: file in which the state of the search is saved; read at start if it exists.
    """

    method: ClassVar[str] = "swift"
    #: Most tokens of a chain, one drafting forward each (``N_D``).
    draft_depth: ClassVar[int] = 25
    #: Number of an answer's last tokens on which candidates are scored (``gamma``).
    context_window: ClassVar[int] = 32
    #: Share of a request's decoding time that it may wait for scoring.
    max_delay: ClassVar[float] = 0.1

    num_speculative_tokens: int = 32
    budget: str = "measured"
    skip_ratio: float = 0.45
    min_confidence: float = 0.8
    optimise_share: float = 0.02
    swift_state: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("skip_ratio", self.skip_ratio, MIN_SKIP_RATIO, MAX_SKIP_RATIO)
        require_number("min_confidence", self.min_confidence, 0.0, 1.0)
        require_number("optimise_share", self.optimise_share, 0.0, 1.0)
        if self.swift_state is not None:
            require_string("swift_state", self.swift_state)
            if not Path(self.swift_state).absolute().parent.is_dir():
                raise ConfigError(f"swift_state={self.swift_state!r}: create its folder first, or leave the key out")

    def search_options(self, num_layers: int) -> SearchOptions:
        """Return the search options for a target of ``num_layers`` layers."""
        return SearchOptions(num_layers, self.skip_ratio)


def check_target(options: SwiftOptions, num_layers: int) -> None:
    """Check the options against the target.

    Raises:
        ConfigError: the target has no sub-layer to skip, or ``swift_state`` is a file of another target.
    """
    if num_layers < 3:
        raise ConfigError(
            f"the target has {num_layers} layer(s), and the first and the last always run: swift cannot skip one; use "
            "another method, such as lookup"
        )
    if not LayerSet.uniform(num_layers, options.skip_ratio).num_skipped:
        raise ConfigError(
            f"skip_ratio={options.skip_ratio} skips no sub-layer of a target of {num_layers} layers, whose first and "
            "last always run: raise skip_ratio, or serve a target of more layers"
        )
    if options.swift_state is not None and Path(options.swift_state).exists():
        load_state(options.swift_state, options.search_options(num_layers))
