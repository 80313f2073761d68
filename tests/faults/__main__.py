"""Plant each fault in a copy of the sources and show that its test fails.

Usage: ``python -m tests.faults [AREA or NAME ...]``.

The tests run first without a fault and must pass.  The working tree is not changed.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.faults.catalogue import FAULTS
from tests.faults.fault import Fault

ROOT = Path(__file__).resolve().parents[2]
#: Seconds that one test may take.
LIMIT = 900
#: pytest's exit status when a test failed.  The others mean that no test could say anything.
TEST_FAILED = 1


class Outcome(NamedTuple):
    """Result of one fault: ``problem`` is empty if its test failed as it must."""

    fault: Fault
    seconds: float
    problem: str


def planted(fault: Fault, root: Path = ROOT) -> str:
    """Return the file's text with the fault.

    Raises:
        ValueError: the file does not contain the old text exactly once.
    """
    text = (root / fault.path).read_text()
    count = text.count(fault.old)
    if count != 1:
        raise ValueError(f"{fault.name}: {fault.path} contains {fault.old!r} {count} times, not once")
    return text.replace(fault.old, fault.new)


def copy_sources(folder: Path) -> None:
    """Copy the repository's files; ``proposers`` is then found within the package, before an editable install."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    if (folder / "proposers").is_dir():
        (folder / "vllm_specplug" / "proposers").symlink_to("../proposers")


@contextmanager
def plant(fault: Fault, folder: Path) -> Iterator[None]:
    """Change the copy in ``folder`` for as long as the context lasts."""
    file = folder / fault.path
    before = file.stat()
    honest, wrong = file.read_text(), planted(fault, folder)
    file.write_text(wrong)
    try:
        yield
    finally:
        file.write_text(honest)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def run_tests(folder: Path, tests: Iterable[str]) -> tuple[int, str]:
    """Run tests in ``folder`` on the sources that lie there; return pytest's exit status and its output."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=line", "-p", "tests.faults.own_sources", *tests]
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return -1, f"still running after {LIMIT} s"
    return done.returncode, done.stdout + done.stderr


def check_fault(fault: Fault, folder: Path) -> Outcome:
    """Plant a fault and run its test."""
    start = time.monotonic()
    with plant(fault, folder):
        status, output = run_tests(folder, [fault.test])
    seconds = time.monotonic() - start
    if status == TEST_FAILED:
        return Outcome(fault, seconds, "")
    if status == 0:
        return Outcome(fault, seconds, "NOT CAUGHT")
    return Outcome(fault, seconds, f"pytest ended with {status}: " + " | ".join(output.splitlines()[-3:]))


def unplanted(folder: Path, faults: Iterable[Fault]) -> list[str]:
    """Run the tests of all faults on the sources as they are, one process per tier; return what fails."""
    tests = sorted({fault.test for fault in faults})
    problems = []
    for tier in sorted({test.split("/")[1] for test in tests}):
        status, output = run_tests(folder, [test for test in tests if test.split("/")[1] == tier])
        if status:
            problems.append(f"without a fault the tests of {tier} fail (pytest ended with {status}):\n{output}")
    return problems


def check_faults(faults: Sequence[Fault], jobs: int) -> Iterator[Outcome]:
    """Check all faults, ``jobs`` at once, each in a copy of its own."""
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
        folders: queue.Queue[Path] = queue.Queue()
        for job in range(jobs):
            folder = Path(temporary) / str(job)
            copy_sources(folder)
            folders.put(folder)
        if problems := unplanted(Path(temporary) / "0", faults):
            sys.exit("\n".join(problems))

        def check(fault: Fault) -> Outcome:
            folder = folders.get()
            try:
                return check_fault(fault, folder)
            finally:
                folders.put(folder)

        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(check, faults)


def chosen(words: Sequence[str]) -> list[Fault]:
    """Return the faults of the named areas or names; all without a word.

    Raises:
        ValueError: a word names nothing, or a fault's text is not in its file.
    """
    known = {word for fault in FAULTS for word in (fault.name, fault.area)}
    if unknown := set(words) - known:
        raise ValueError(f"no fault or area {', '.join(sorted(unknown))}; areas: {', '.join(areas())}")
    found = [fault for fault in FAULTS if not words or {fault.name, fault.area} & set(words)]
    for fault in found:
        planted(fault)
    return found


def areas() -> list[str]:
    """Return the names of all areas."""
    return sorted({fault.area for fault in FAULTS})


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", metavar="AREA or NAME", help="only these faults")
    parser.add_argument("--jobs", type=int, default=1, help="faults that are checked at once")
    arguments = parser.parse_args()
    try:
        faults = chosen(arguments.words)
    except ValueError as error:
        parser.error(str(error))
    failed = 0
    for outcome in check_faults(faults, arguments.jobs):
        failed += bool(outcome.problem)
        fault = outcome.fault
        print(f"{fault.area:14} {fault.name:58} {outcome.seconds:5.0f} s  {outcome.problem or fault.test}", flush=True)
    print(f"{len(faults) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
