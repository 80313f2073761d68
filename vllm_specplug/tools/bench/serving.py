"""A worker's end of the pipe to ``workers.Worker``: JSON lines in on stdin, JSON lines out on what was stdout.

The first line holds the engine's arguments and is answered when it is ready, every further one by the engine, and
``{"close"}`` by the peak memory.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

Message = dict[str, Any]
#: What is said when it is ready, and what answers a request.
Engine = tuple[Message, Callable[[Message], Message]]


def run_worker(start: Callable[[Message], Engine]) -> None:
    """Be a worker; ``start`` makes the engine of its arguments."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints goes to the log
    serve(start, sys.stdin, channel)


def serve(start: Callable[[Message], Engine], requests: TextIO, replies: TextIO) -> None:
    """Answer requests until one asks for the end, or the pipe closes."""

    def reply(message: Message) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    ready, answer = start(json.loads(requests.readline()))
    reply(ready)
    for line in requests:
        request = json.loads(line)
        if "close" in request:
            reply({"peak_rss_mib": peak_rss_mib(os.getpid())})
            return
        reply(answer(request))


def family_status(pid: int) -> list[dict[str, str]]:
    """``/proc/PID/status`` of a process and its living descendants, each by its keys."""
    parents: dict[int, int] = {}
    statuses: dict[int, dict[str, str]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            lines = (folder / "status").read_text().splitlines()
        except OSError:  # ended meanwhile
            continue
        fields = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
        parents[int(folder.name)], statuses[int(folder.name)] = int(fields["PPid"]), fields
    family, grown = {pid}, True
    while grown:
        more = {child for child, parent in parents.items() if parent in family} - family
        family, grown = family | more, bool(more)
    return [statuses[member] for member in family if member in statuses]


def peak_rss_mib(pid: int) -> int:
    """Peak resident memory of a process and its living descendants (shared pages count in each)."""
    return sum(int(status.get("VmHWM", "0 kB").split()[0]) for status in family_status(pid)) // 1024
