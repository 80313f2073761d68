"""The state of SWIFT's searches for a target, by stream of requests; saved in a file across restarts of the server."""

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
#: The stream of requests that name none, and the most streams kept.
DEFAULT_STREAM, MAX_STREAMS = "", 32
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


@dataclass
class SwiftState:
    """The searches for one target, with counts and times.

    Attributes:
        options: of the searches.
        streams: the search of each stream, the newest last.
        acceptance: counts by stream.
        seconds: time by phase: ``draft``, ``optimise`` (scoring candidates), ``propose`` (selecting candidates),
            ``served`` (all steps, including drafting and optimisation).
        saved_at: ``time.monotonic`` of the last write.
    """

    options: SearchOptions
    streams: dict[str, LayerSearch] = field(default_factory=dict)
    acceptance: dict[str, Acceptance] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    saved_at: float = 0.0

    def search(self, stream: str = DEFAULT_STREAM) -> LayerSearch:
        """Return the search of a stream; a new stream starts from the best set of the default stream."""
        if stream not in self.streams:
            if len(self.streams) >= MAX_STREAMS:
                oldest = next(name for name in self.streams if name != DEFAULT_STREAM)
                del self.streams[oldest], self.acceptance[oldest]
            start = self.streams[DEFAULT_STREAM].best if DEFAULT_STREAM in self.streams else None
            self.streams[stream] = LayerSearch(self.options, seed=len(self.streams), best=start)
            self.acceptance[stream] = Acceptance()
        return self.streams[stream]

    def save(self, path: str) -> None:
        """Write the state to a file."""
        content = {
            "swift_state": FORMAT,
            "num_layers": self.options.num_layers,
            "skip_ratio": self.options.skip_ratio,
            "seconds": self.seconds,
            "streams": {
                name: search.to_json() | {"acceptance": vars(self.acceptance[name])}
                for name, search in self.streams.items()
            },
        }
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(content), encoding="utf-8")
        self.saved_at = time.monotonic()

    def save_now_and_then(self, path: str) -> None:
        """Write the state to a file, unless the last write was less than ``SAVE_SECONDS`` ago."""
        if time.monotonic() - self.saved_at >= SAVE_SECONDS:
            self.save(path)


def read_state(path: str) -> dict[str, Any]:
    """Read a file written by ``SwiftState.save``.

    Raises:
        ConfigError: the file cannot be read, or is not such a file.
    """
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
    content = read_state(path)
    for name, own in (("num_layers", options.num_layers), ("skip_ratio", options.skip_ratio)):
        if content.get(name) != own:
            raise ConfigError(
                f"swift_state={path!r} has {name}={content.get(name)!r}, this server has {own!r}: give another file"
            )
    state = SwiftState(options, saved_at=time.monotonic())
    try:
        state.seconds |= {phase: float(content["seconds"][phase]) for phase in PHASES}
        for name, saved in content["streams"].items():
            state.streams[name] = LayerSearch.from_json(options, saved)
            state.acceptance[name] = Acceptance(**saved["acceptance"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"swift_state={path!r} is damaged ({error}): remove it, or give another file") from error
    return state
