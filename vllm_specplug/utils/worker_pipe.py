"""The worker's end of a pipe: it reads requests from stdin and writes replies to its original stdout, as JSON lines.

The first line holds the engine's arguments; its reply says that the engine is ready.  The engine answers each later
line.  ``{"close"}`` is answered with the peak memory, and the worker ends.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

from vllm_specplug.utils.processes import peak_rss_mib

Message = dict[str, Any]
#: The first reply, and the function that answers a request.
Engine = tuple[Message, Callable[[Message], Message]]


def run_worker(start: Callable[[Message], Engine]) -> None:
    """Serve requests until the end; ``start`` makes the engine from its arguments."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints goes to the log
    serve(start, sys.stdin, channel)


def serve(start: Callable[[Message], Engine], requests: TextIO, replies: TextIO) -> None:
    """Answer requests until one says ``close`` or the pipe closes."""

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
