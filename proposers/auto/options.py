"""Options of ``{"method": "auto"}``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from vllm_specplug.config import BUDGETS, ConfigError, TreeOptions, require_string


@dataclass(frozen=True, kw_only=True)
class AutoOptions(TreeOptions):
    """Options of the automatic choice; all others are those of the chosen method.

    Attributes:
        budget: ``auto``: ``measured``.
        reload: None: on, if the drafter lies in a folder in which versions are published and can be taken.
        model: a drafter to use: a directory, a Hugging Face repository or the short name of a shipped one; None: a
            shipped one that was trained for the model, if there is one.
        learn: folder in which a drafter learns from the traffic: answers are recorded there, a trainer runs beside
            the server, and its versions are taken; None: nothing is recorded.
        record_mib: beside ``learn``: limit of the recorded answers; None: the default of the other methods.
        traffic_tokens: of ``lookup``; None: its default.
    """

    method: ClassVar[str] = "auto"
    drafter_packages: ClassVar[tuple[str, ...]] = ("medusa", "hass", "eagle2")
    budgets: ClassVar[tuple[str, ...]] = (*BUDGETS, "auto")

    budget: str = "auto"
    reload: bool | None = None
    model: str | None = None
    learn: str | None = None
    record_mib: int | None = None
    traffic_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is not None:
            require_string("model", self.model)
        if self.learn is not None:
            require_string("learn", self.learn)
            if not Path(self.learn).absolute().parent.is_dir():
                raise ConfigError(f"learn={self.learn!r}: create the folder above it first, or leave the key out")
        if self.record_mib is not None and self.learn is None:
            raise ConfigError("record_mib needs learn: give a folder, or leave record_mib out")
