"""DFlash, DSpark, P-EAGLE: heads that predict all positions in one forward draft trees of the likeliest paths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from vllm_specplug.config import (
    DEVICE_NODES,
    MAX_DRAFT_DEPTH,
    TreeOptions,
    node_floor,
    require_int,
    require_number,
    require_string,
)
from vllm_specplug.proposer import DrafterConfig, Method, ModelDrafter, TargetInfo


@dataclass(frozen=True, kw_only=True)
class DFlashOptions(TreeOptions):
    """Options of ``{"method": "dflash_tree"}``.

    Attributes:
        model: the head: a directory or a Hugging Face repository.
        draft_depth: positions that are predicted, the levels of the tree; None: as many as in the head's training.
        min_node_value: nodes of a lower value (product of probabilities from the root) are not verified; by default
            0.06 with a fixed budget, 0 with a measured one.
    """

    method: ClassVar[str] = "dflash_tree"
    #: Above temperature 0, drafts use the noise that the target's sampler will use.
    coupled: ClassVar[bool] = True
    device_sizes: ClassVar[Mapping[str, int]] = {"num_speculative_tokens": DEVICE_NODES}

    model: str
    draft_depth: int | None = None
    min_node_value: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_string("model", self.model)
        if self.draft_depth is not None:
            require_int("draft_depth", self.draft_depth, 1, MAX_DRAFT_DEPTH)
        if self.min_node_value is not None:
            require_number("min_node_value", self.min_node_value, 0.0, 0.5)

    @cached_property
    def node_floor(self) -> float:
        """Return ``min_node_value`` or its default."""
        return node_floor(self.min_node_value, self.budget)

    @property
    def scratch_rows(self) -> int:
        """Return the rows of one request that a draft phase keeps outside the pages: the root and each position."""
        return 1 + (self.draft_depth or MAX_DRAFT_DEPTH)


def configure(options: DFlashOptions, target: TargetInfo) -> DrafterConfig:
    """Check a head against the target; vLLM loads it with its own class."""
    from .checkpoint import read_head

    return read_head(options, target)


METHOD = Method(
    "dflash_tree",
    DFlashOptions,
    model=ModelDrafter(
        configure,
        v1="vllm_specplug.cpu.drafters.best_first:make_drafter",
        v2="vllm_specplug.gpu.drafters.blocks:make_speculator",
        is_vllm_model=True,
    ),
)
