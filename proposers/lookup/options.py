"""Options of ``{"method": "lookup"}``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from vllm_specplug.config import (
    DEVICE_NODES,
    MAX_DRAFT_DEPTH,
    MEASURED_NODE_FLOOR,
    ConfigError,
    TreeOptions,
    node_floor,
    require_int,
    require_number,
)

MAX_TRAFFIC_TOKENS = 1 << 24


@dataclass(frozen=True, kw_only=True)
class LookupOptions(TreeOptions):
    """Options of lookup: n-gram matches in the request's own tokens and in recent traffic.

    Attributes:
        draft_depth: longest continuation, in tokens.
        min_node_value: nodes below this estimated acceptance probability are not drafted; by default 0.06 with a fixed
            budget, 0.01 with a measured one.
        traffic_tokens: capacity for answers of finished requests, in tokens; with 0, a request is matched with its own
            tokens only.  By default 131072.
    """

    method: ClassVar[str] = "lookup"
    #: Shortest match, in tokens; 1 also looks for the last token alone.
    min_match: ClassVar[int] = 1
    #: Longer matches count as this long, in tokens.
    max_match: ClassVar[int] = 16
    #: Number of newest positions examined in each index, and of the longest matches among all of them that are drafted.
    max_candidates: ClassVar[int] = 8
    device_sizes: ClassVar[Mapping[str, int]] = {"num_speculative_tokens": DEVICE_NODES}

    draft_depth: int = 16
    min_node_value: float | None = None
    traffic_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("draft_depth", self.draft_depth, 1, MAX_DRAFT_DEPTH)
        require_number("min_node_value", self.node_floor, 0.0, 0.5)
        require_int("traffic_tokens", self.kept_tokens, 0, MAX_TRAFFIC_TOKENS)
        if 0 < self.kept_tokens < 1024:
            raise ConfigError(f"traffic_tokens={self.traffic_tokens} is too small: choose 1024 or more, or 0 for none")

    @cached_property
    def node_floor(self) -> float:
        """``min_node_value`` with its default resolved."""
        return node_floor(self.min_node_value, self.budget, MEASURED_NODE_FLOOR)

    @property
    def kept_tokens(self) -> int:
        """``traffic_tokens`` with its default resolved."""
        return 1 << 17 if self.traffic_tokens is None else self.traffic_tokens
