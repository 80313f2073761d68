"""Takes published versions of the drafter between two steps, and takes one back that accepts less.

A thread looks at the pointer of the published folder once a second.  A new version is read and checked in another
thread, on every tensor-parallel rank, while steps go on.  When all ranks are ready, they exchange the weights in front
of the same step.  Key/value that the old version has written stays in the drafter's pages: a draft never changes a
token, and the hidden states to write it again are gone.  So requests that run at the change may accept less, and the
versions are compared by later requests only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from vllm_specplug.core.acceptance import Acceptance, Comparison
from vllm_specplug.types import TokenTree, Walk
from vllm_specplug.utils.metrics import Counters
from vllm_specplug.utils.published import POINTER_NAME, Published, read_current
from vllm_specplug.vllm.ranks import agreed, leads, on_all_ranks

logger = logging.getLogger("vllm_specplug")

#: Seconds between two looks at the pointer.
LOOK_EVERY = 1.0
#: With several ranks, steps after which they hear whether there is something to do: a message takes time.
STEPS_BETWEEN = 16
#: Niceness of the threads that read checkpoints: steps come first, but on a full machine these go on too.
NICE = 10

#: Messages of the first rank to all: ``read`` this version, ask whether all are ``ready``, go ``back`` to the old one.
_Order = tuple[str, Any]


class Reloading:
    """Follows a published folder; all ranks have one, and the first rank decides.

    Args:
        drafter: the V1 adapter, with its weights loaded.
        head: the published folder.
        folder: the version that the drafter has loaded, a folder in it.
        requests: by id, all requests that the runner knows.
        counters: for ``/metrics``.
    """

    def __init__(self, drafter: Any, head: str, folder: str, requests: Collection[str], counters: Counters):
        self._drafter, self._head, self._counters, self._requests = drafter, head, counters, requests
        self._check = drafter.version_check(folder)
        #: The version in use, and on the first rank what its trees are worth.
        self.version = int(Path(folder).name)
        self._acceptance = Acceptance()
        self._reading: _Reading | None = None
        self._steps, self._every = 0, STEPS_BETWEEN if len(on_all_ranks(None)) > 1 else 1
        #: Of the first rank: the last comparison, and the way back while it lasts.
        self._comparison: Comparison | None = None
        self._old: tuple[int, Any, Acceptance] | None = None
        #: Requests that ran at the last change, which say nothing of the new version.
        self._at_change: set[str] = set()
        self._pointer = _Pointer(head, self.version) if leads() else None
        counters.serve_version(self.version)

    # ---- acceptance

    def walked(self, request_ids: Sequence[str], tree: TokenTree, walk: Walk) -> None:
        """Note what the target accepted of the trees of a step."""
        trees = accepted = 0
        comparison = self._comparison
        counts = zip(request_ids, tree.num_rows.tolist(), walk.num_emitted.tolist(), strict=True)
        for request_id, num_rows, emitted in counts:
            if num_rows == 1 or not emitted:
                continue
            trees, accepted = trees + 1, accepted + emitted - 1
            if request_id not in self._at_change:
                self._acceptance.add(request_id, emitted - 1)
                if comparison is not None:
                    comparison.after.add(request_id, emitted - 1)
        if trees:
            self._counters.add_trees(self.version, trees, accepted)

    def finish(self, request_ids: Collection[str]) -> None:
        """Forget requests that have ended."""
        self._at_change.difference_update(request_ids)
        self._acceptance.finish(request_ids)
        if self._comparison is not None:
            self._comparison.after.finish(request_ids)

    # ---- versions

    def before_step(self) -> None:
        """Take another version, if there is one; called in front of every step."""
        self._steps += 1
        if self._steps % self._every:
            return
        if (order := agreed(self._decide() if self._pointer is not None else None)) is not None:
            what, value = order
            {"read": self._read, "ready": self._take_when_ready, "back": self._go_back}[what](value)

    def _decide(self) -> _Order | None:
        """Return the message for all ranks; called on the first one."""
        comparison, reading = self._comparison, self._reading
        if comparison is not None and comparison.is_worse():
            return "back", comparison.means()
        if comparison is not None and comparison.has_ended:
            self._end_comparison()
        if reading is not None:
            return ("ready", None) if reading.has_ended else None
        # The next version waits until the last one was compared.
        if self._comparison is None and (found := self._pointer.take()) is not None:
            return "read", found
        return None

    def _end_comparison(self) -> None:
        self._comparison = self._old = None

    def _read(self, found: Published) -> None:
        self._reading = _Reading(found, lambda: self._drafter.new_version(found.folder, self._check))

    def _take_when_ready(self, _: None) -> None:
        """Exchange the weights if all ranks have read them; forget the version if one has failed."""
        reading = self._reading
        states = on_all_ranks(reading.state())
        if "reads" in states:
            return
        self._reading = None
        if all(state == "has read" for state in states):
            states = on_all_ranks(reading.prepare())
        if problems := [state for state in states if state != "has read"]:
            if leads():
                self._counters.add("drafters_refused")
                logger.warning(
                    "vllm-specplug: version %d of the drafter is not taken, version %d stays in use: %s",
                    *(reading.found.version, self.version, problems[0]),
                )
            return
        reading.new.exchange()
        self._old = self.version, reading.new, self._acceptance
        self._comparison = Comparison(self._acceptance.blocks)
        self._serve(reading.found.version, Acceptance())
        if leads():
            self._counters.add("drafters_taken")
            logger.info(
                "vllm-specplug: version %d of the drafter is in use, published %s; version %d is kept until the new "
                "one was compared with it",
                *(self.version, reading.found.published, self._old[0]),
            )

    def _go_back(self, means: tuple[float, float]) -> None:
        version, weights, acceptance = self._old
        weights.exchange()
        if leads():
            self._counters.add("drafters_rolled_back")
            logger.warning(
                "vllm-specplug: version %d of the drafter accepted %.2f tokens per tree, version %d before it %.2f: "
                "version %d is in use again, and version %d is not tried again",
                *(self.version, means[1], version, means[0], version, self.version),
            )
        self._end_comparison()
        self._serve(version, acceptance)

    def _serve(self, version: int, acceptance: Acceptance) -> None:
        self.version, self._acceptance = version, acceptance
        self._at_change = set(self._requests)
        self._counters.serve_version(version)


class _Reading:
    """Reads a version in a thread.

    Args:
        found: the version.
        read: returns its ``NewVersion``.
    """

    def __init__(self, found: Published, read: Callable[[], Any]):
        self.found, self.new = found, None
        self._read, self._problem = read, ""
        self._thread = threading.Thread(target=self._run, name="specplug-version", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def state(self) -> str:
        """Return ``reads``, ``has read`` or what went wrong."""
        return self._problem or ("has read" if self.has_ended else "reads")

    def prepare(self) -> str:
        """Pack the weights; return the new state."""
        self._try(self.new.prepare)
        return self.state()

    def _run(self) -> None:
        _be_nice()
        self._try(self._keep)

    def _keep(self) -> None:
        self.new = self._read()

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # whatever a damaged file, a full memory or vLLM's loader raises: the old one stays
            self._problem = f"{type(error).__name__}: {error}"


class _Pointer:
    """Looks at a published folder's pointer in a thread, and hands every version over once.

    Args:
        head: the folder.
        version: that is in use.
    """

    def __init__(self, head: str, version: int):
        self._file, self._seen = Path(head) / POINTER_NAME, {version}
        self._found: Published | None = None
        self._known: tuple[int, int] | None = None
        self._problem = ""
        threading.Thread(target=_look_often, args=(weakref.ref(self),), name="specplug-pointer", daemon=True).start()

    def take(self) -> Published | None:
        """Return the newest version that was not returned before, if there is one."""
        found, self._found = self._found, None
        return found

    def look(self) -> None:
        """Find the version that the pointer names."""
        try:
            status = os.stat(self._file)
            if self._known != (state := (status.st_mtime_ns, status.st_ino)):
                current = read_current(self._file.parent)
                if current.version not in self._seen:
                    self._seen.add(current.version)
                    self._found = current
                self._known, self._problem = state, ""
        except (OSError, ValueError) as error:  # a folder that is gone may come back
            self._known = None
            if not self._problem:  # told once, until the folder can be read again
                self._problem = str(error)
                logger.warning(
                    "vllm-specplug: versions of the drafter cannot be read, and the one in use stays: %s", error
                )


def _look_often(pointer: weakref.ref[_Pointer]) -> None:
    """Look at a pointer once a second while it is used."""
    _be_nice()
    while (alive := pointer()) is not None:
        alive.look()
        del alive
        time.sleep(LOOK_EVERY)


def _be_nice() -> None:
    """Give this thread a low priority."""
    if hasattr(os, "setpriority"):
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
