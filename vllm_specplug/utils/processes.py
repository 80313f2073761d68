"""Programs of ours that run beside a server, and the memory of a process and its descendants."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

#: Seconds that a program has to end by itself.
END_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1


class ChildProgram:
    """A program that ends with this process, however this process ends (on Linux).

    Args:
        command: its command line.
        log: file that its output is added to.
    """

    def __init__(self, command: Sequence[str], log: Path):
        with open(log, "ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=partial(_end_with, os.getpid()),
            )

    def end(self) -> None:
        """Ask the program to end, and wait for it."""
        self.process.terminate()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _end_with(parent: int) -> None:
    """Let the system send this process a signal when its parent has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it has ended already
            os._exit(0)


def family_status(pid: int) -> list[dict[str, str]]:
    """Return ``/proc/PID/status`` of a process and its living descendants, each as a dict of its fields."""
    parents: dict[int, int] = {}
    statuses: dict[int, dict[str, str]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            lines = (folder / "status").read_text().splitlines()
        except OSError:  # the process has ended since the listing
            continue
        fields = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
        parents[int(folder.name)], statuses[int(folder.name)] = int(fields["PPid"]), fields
    family, grown = {pid}, True
    while grown:
        more = {child for child, parent in parents.items() if parent in family} - family
        family, grown = family | more, bool(more)
    return [statuses[member] for member in family if member in statuses]


def peak_rss_mib(pid: int) -> int:
    """Return the peak resident memory of a process and its living descendants; shared pages count in each process."""
    return sum(int(status.get("VmHWM", "0 kB").split()[0]) for status in family_status(pid)) // 1024


@contextlib.contextmanager
def terminate_like_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM, so that the block ends in the same way."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
