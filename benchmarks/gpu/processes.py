"""Processes that may hang or die: workers that answer step by step, and pytest files."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.plan import ROOT
from vllm_specplug.utils.environment import first_error


class Worker:
    """A process of ``gpu_worker``, for the steps of one group.

    Attributes:
        used: whether it has answered a step.
    """

    def __init__(self, module: str = "benchmarks.gpu.gpu_worker"):
        self.used = False
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the worker)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=ROOT,
            text=True,
            start_new_session=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def ask(self, question: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Return ``rows`` and how the step ended (``done``, ``reason``, ``traceback``), also of one that hangs."""
        rows: list[dict[str, Any]] = []
        end, self.used = time.monotonic() + timeout, True
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        while True:
            try:
                line = self._lines.get(timeout=max(end - time.monotonic(), 0.0))
            except queue.Empty:
                return {"rows": rows, **ending(None, timeout, self.close())}
            if line is None:
                code = self._process.wait()
                return {"rows": rows, **ending(code, timeout, self.close())}
            found = json.loads(line)
            if "done" in found:
                return {"rows": rows, **found}
            rows.append(found["row"])

    def close(self) -> str:
        """End the process and all that it started; return what it wrote to stderr."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._errors.seek(0)
        return self._errors.read()


def run_process(command: list[str], timeout: float) -> tuple[int | None, str, str]:
    """Return exit code (None: out of time), output and errors; all processes that it started end with it."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=output, stderr=errors, cwd=ROOT, start_new_session=True)
        code = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for file in (output, errors):
            file.seek(0)
        return code, output.read(), errors.read()


def ending(code: int | None, timeout: float, log: str) -> dict[str, Any]:
    """Return how a process failed: the reason in one line, and the last lines of its log."""
    how = f"no end in {timeout:g} s" if code is None else f"exit code {code}"
    if code is not None and code < 0:
        how = f"killed by {signal.Signals(-code).name}"
    raised = first_error(log)
    reason = f"{how}: {raised}" if raised else how
    return {"done": "failed", "reason": reason, "traceback": log.splitlines()[-25:]}


def run_tests(question: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Run a test file; return its outcomes, also of a process that dies or hangs, up to its last test.

    Args:
        question: ``file``; ``alone``: the file needs no ``conftest.py`` and so no vLLM; ``interpret``: it has to name
            the interpreter itself then, and runs few tests only.
    """
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", question["file"]]
    if question.get("alone"):
        command.insert(-1, "--noconftest")
    if question["interpret"]:
        command[1:3] = ["-c", "from tests.doubles.interpreter import use_interpreter as u; u(); import pytest, sys; "
                        "sys.exit(pytest.main(sys.argv[1:]))"]  # fmt: skip
        command += ["-k", "lookup or keys"]
    elif question.get("alone") and find_spec("xdist") is not None:
        command += ["-n", "8"]  # on a GPU most of the time is that of compiling, on one core each
    code, output, errors = run_process(command, timeout)
    tests = re.findall(r"^(\S+\.py::.+?)(?: (PASSED|FAILED|ERROR|SKIPPED)\b.*)? *$", output, re.MULTILINE)
    in_parallel = re.findall(r"^\[gw\d+\] \[ *\d+%\] (\w+) (\S+\.py::.+?) *$", output, re.MULTILINE)
    tests += [(name, outcome) for outcome, name in in_parallel]
    counts = Counter(outcome.lower() for _, outcome in tests if outcome)
    rows = [{"file": Path(question["file"]).name, **counts}]
    lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))]
    if code == 0 and counts["passed"]:
        return {"rows": rows, "done": "passed"}
    if code in (0, 5):
        return {"rows": rows, "done": "skipped", "reason": "no test of the file can run here"}
    if code == 1 and lines:
        reason = f"{counts['failed'] + counts['error']} tests failed: {lines[-1][:300]}"
        return {"rows": rows, "done": "failed", "reason": reason, "traceback": lines[:60]}
    found = ending(code, timeout, errors.strip() or output)
    where = f"in {tests[-1][0]}, " if tests and not tests[-1][1] else ""
    return {"rows": rows, **found, "reason": where + found["reason"]}
