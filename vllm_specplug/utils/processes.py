"""Memory of a process and its descendants, read from ``/proc``."""

from __future__ import annotations

from pathlib import Path


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
