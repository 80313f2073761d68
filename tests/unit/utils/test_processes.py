"""A program beside a server ends with it, also if the server is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_specplug.utils import processes
from vllm_specplug.utils.processes import ChildProgram

SLEEP = "import time; print('begun', flush=True); time.sleep(600)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
PARENT = """
import sys, time
from pathlib import Path
from vllm_specplug.utils.processes import ChildProgram
child = ChildProgram([sys.executable, "-c", sys.argv[1]], Path(sys.argv[2]))
print(child.process.pid, flush=True)
time.sleep(600)
"""


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("program", [SLEEP, DEAF])
def test_it_ends_when_it_is_told_to(tmp_path, monkeypatch, program):
    """One that does not listen is killed; its output is in the file."""
    monkeypatch.setattr(processes, "END_SECONDS", 0.2 if program == DEAF else 60.0)
    child = ChildProgram([sys.executable, "-c", program], tmp_path / "log")
    wait_for(lambda: (tmp_path / "log").read_text() == "begun\n")
    assert runs(child.process.pid)
    child.end()
    assert child.process.returncode == -(signal.SIGKILL if program == DEAF else signal.SIGTERM)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such signal")
def test_it_ends_with_a_killed_parent(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, SLEEP, str(tmp_path / "log")], stdout=subprocess.PIPE)
    child = int(parent.stdout.readline())
    wait_for(lambda: "begun" in (tmp_path / "log").read_text())
    assert runs(child)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_for(lambda: not runs(child))
