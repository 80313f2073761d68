"""The state of SWIFT's search for a target; saved in a file across restarts of the server."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_specplug.config import ConfigError
from vllm_specplug.utils.files import replacing

from .search import LayerSearch, SearchOptions

FORMAT = 1
#: Key of the search in the file.  Earlier versions kept further searches under other keys, which are not read.
SEARCH_KEY = ""
#: Least seconds between two writes of the file.
SAVE_SECONDS = 10.0
PHASES = ("draft", "optimise", "propose", "served")


@dataclass
class Acceptance:
    """Counts of drafts and accepted tokens.

    Attributes:
        rounds: verified drafts.
        draft_steps: drafting forwards of these drafts.
        accepted: accepted tokens.
    """

    rounds: int = 0
    draft_steps: int = 0
    accepted: int = 0

    @property
    def tokens_per_step(self) -> float:
        """Tokens per verified draft, including the bonus token (``M``)."""
        return 1 + self.accepted / max(self.rounds, 1)

    @property
    def alpha(self) -> float:
        """Accepted tokens per drafting forward."""
        return self.accepted / max(self.draft_steps, 1)


@dataclass
class SwiftState:
    """The search for one target, with counts and times.

    Attributes:
        options: of the search.
        search: the search; by default a new one.
        acceptance: counts of all drafts.
        seconds: time by phase: ``draft``, ``optimise`` (scoring candidates), ``propose`` (selecting candidates),
            ``served`` (all steps, including drafting and optimisation).
        saved_at: ``time.monotonic`` of the last write.
    """

    options: SearchOptions
    search: LayerSearch = None  # type: ignore[assignment]
    acceptance: Acceptance = field(default_factory=Acceptance)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    saved_at: float = 0.0

    def __post_init__(self) -> None:
        self.search = self.search or LayerSearch(self.options)

    def save(self, path: str) -> None:
        """Write the state to a file."""
        content = {
            "swift_state": FORMAT,
            "num_layers": self.options.num_layers,
            "skip_ratio": self.options.skip_ratio,
            "seconds": self.seconds,
            "streams": {SEARCH_KEY: self.search.to_json() | {"acceptance": vars(self.acceptance)}},
        }
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(content), encoding="utf-8")
        self.saved_at = time.monotonic()

    def save_now_and_then(self, path: str) -> None:
        """Write the state to a file, unless the last write was less than ``SAVE_SECONDS`` ago."""
        if time.monotonic() - self.saved_at >= SAVE_SECONDS:
            self.save(path)


def _read(path: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"swift_state={path!r} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("swift_state") != FORMAT:
        raise ConfigError(f"swift_state={path!r} was not written by this version's method 'swift': give another file")
    return content


def load_state(path: str, options: SearchOptions) -> SwiftState:
    """Load the state saved by an earlier server.

    Raises:
        ConfigError: the file is damaged, or of another target or ``skip_ratio``.
    """
    content = _read(path)
    for name, own in (("num_layers", options.num_layers), ("skip_ratio", options.skip_ratio)):
        if content.get(name) != own:
            raise ConfigError(
                f"swift_state={path!r} has {name}={content.get(name)!r}, this server has {own!r}: give another file"
            )
    state = SwiftState(options, saved_at=time.monotonic())
    try:
        state.seconds |= {phase: float(content["seconds"][phase]) for phase in PHASES}
        saved = content["streams"][SEARCH_KEY]
        state.search = LayerSearch.from_json(options, saved)
        state.acceptance = Acceptance(**saved["acceptance"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"swift_state={path!r} is damaged ({error}): remove it, or give another file") from error
    return state
