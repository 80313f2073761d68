"""Options of ``{"method": "union"}``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from vllm_specplug.config import (
    DEVICE_NODES,
    MEASURED_NODE_FLOOR,
    ConfigError,
    TreeOptions,
    node_floor,
    parse_options,
    require_number,
)
from vllm_specplug.proposer import find_method

#: With a fixed budget on the V1 runner, so many nodes are verified from a low value on.  Rows after them cost more: on
#: a CPU, up to six rows mostly wait for memory, more of them for products (docs/measurements.md, *Nodes of the union*).
CHEAP_NODES, COSTLY_NODE_FLOOR = 5, 0.25

#: There are ``3 ** num_sources`` patterns of agreement, each with its own weights.
MAX_SOURCES = 4

_UNION_ONLY = (
    "trace_trees",
    "budget",
    "verification",
    "typical_epsilon",
    "typical_delta",
    "tree_attention",
    "linear_rows",
    "on_failure",
    "reload",
)

_EXAMPLE = '"sources": [{"method": "eagle2", "model": ...}, {"method": "lookup"}]'


@dataclass(frozen=True, kw_only=True)
class UnionOptions(TreeOptions):
    """Options of a union of proposers.

    Attributes:
        sources: options of each source, given as dictionaries, each with its ``method``.  A source drafts up to its own
            ``num_speculative_tokens`` nodes; the union keeps the best of all of them.
        min_node_value: nodes below this estimated acceptance probability are not verified; by default 0.06 with a fixed
            budget, 0.01 with a measured one.  By default, a fixed budget on the V1 runner verifies nodes beyond the
            best 5 from 0.25 on.
    """

    method: ClassVar[str] = "union"
    device_sizes: ClassVar[Mapping[str, int]] = {"num_speculative_tokens": DEVICE_NODES}

    sources: tuple[TreeOptions, ...]
    min_node_value: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("min_node_value", self.node_floor, 0.0, 0.5)
        if not isinstance(self.sources, list | tuple) or not 1 <= len(self.sources) <= MAX_SOURCES:
            raise ConfigError(f"sources must be a list of 1 to {MAX_SOURCES} sources, like {_EXAMPLE}")
        sources = tuple(_parse_source(number, source, self.budget) for number, source in enumerate(self.sources))
        names = [source.method for source in sources]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"sources: {twice[0]!r} is given twice; give each method once")
        if sum(find_method(name).model is not None for name in names) > 1:
            raise ConfigError(
                "sources: only one of them may be a drafter with weights (eagle2, hass, mtp_tree, draft_tree, "
                "dflash_tree, medusa, swift): leave the others out"
            )
        object.__setattr__(self, "sources", sources)

    @cached_property
    def node_floor(self) -> float:
        """``min_node_value`` with its default resolved."""
        return node_floor(self.min_node_value, self.budget, MEASURED_NODE_FLOOR)

    @cached_property
    def costly_node_floor(self) -> float:
        """``min_node_value`` of the nodes other than the best ``CHEAP_NODES``."""
        return COSTLY_NODE_FLOOR if self.min_node_value is None and self.budget == "fixed" else self.node_floor


def _parse_source(number: int, given: object, budget: str) -> TreeOptions:
    if isinstance(given, TreeOptions):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(f"sources[{number}] must be an object with a method, not {given!r}: {_EXAMPLE}")
    given = {str(key).replace("-", "_"): value for key, value in given.items()}
    if given.get("method") == UnionOptions.method:
        raise ConfigError(f"sources[{number}] is itself a union: list its sources in the outer union")
    if given.get("method") == "auto":
        raise ConfigError(f"sources[{number}]: 'auto' chooses all sources: use it as the only method")
    if misplaced := sorted(set(given) & set(_UNION_ONLY)):
        raise ConfigError(f"sources[{number}]: {misplaced[0]!r} belongs to the union: give it next to 'sources'")
    try:
        return parse_options({**given, "budget": budget})
    except ConfigError as error:
        raise ConfigError(f"sources[{number}]: {error}") from error
