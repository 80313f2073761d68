"""Options of ``{"method": "auto"}``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_specplug.config import TreeOptions, require_string


@dataclass(frozen=True, kw_only=True)
class AutoOptions(TreeOptions):
    """Options of the automatic choice; all others are those of what it chooses.

    Attributes:
        budget: ``measured`` on a CPU, ``fixed`` elsewhere.
        model: a drafter to use: a directory, a Hugging Face repository or the short name of a shipped one; None: a
            shipped one that was trained for the model, if there is one.
    """

    method: ClassVar[str] = "auto"
    drafter_packages: ClassVar[tuple[str, ...]] = ("medusa", "hass", "eagle2")

    model: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is not None:
            require_string("model", self.model)
