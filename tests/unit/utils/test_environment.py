"""What is read off this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from vllm_specplug.utils import environment


@pytest.mark.parametrize(
    ("flags", "slow"),
    [
        ({"avx2"}, True),
        ({"avx2", "avx512f"}, False),
        ({"avx2", "avx_ne_convert"}, False),
        ({"asimd"}, False),
    ],
)
def test_slow_in_bfloat16(monkeypatch, flags, slow):
    monkeypatch.setattr(environment, "_cpu_flags", lambda: flags)
    assert environment.lacks_avx512() == slow


@pytest.mark.parametrize(
    ("flags", "possible"),
    [
        ({"avx2"}, True),
        ({"avx2", "avx512f"}, False),
        ({"avx2", "avx512f", "avx512_vnni"}, True),
        ({"asimd"}, False),
    ],
)
def test_products_of_bytes(monkeypatch, flags, possible):
    monkeypatch.setattr(environment, "_cpu_flags", lambda: flags)
    assert environment.multiplies_bytes() == possible


def test_available_memory(monkeypatch, tmp_path):
    assert 0 < environment.available_gib() < 1e5
    monkeypatch.setattr(environment, "Path", lambda _: tmp_path / "none")
    assert environment.available_gib() is None


def test_memory_of_a_process_group():
    program = "import sys; x = bytearray(b'1' * 2**26); print(flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
    )
    try:
        child.stdout.readline()
        assert 64 / 1024 < environment.process_group_gib(child.pid) < 0.5
    finally:
        child.kill()
        child.wait()
    assert environment.process_group_gib(child.pid) is None


@pytest.mark.skipif(shutil.which("lscpu") is None, reason="lscpu is missing")
def test_cores_are_those_of_lscpu():
    listed = subprocess.run(["lscpu", "--parse=CPU,CORE"], capture_output=True, text=True, check=True).stdout
    cores = dict(line.split(",") for line in listed.splitlines() if not line.startswith("#"))
    assert environment.num_cores() == len({cores[str(cpu)] for cpu in os.sched_getaffinity(0)})


def test_threads_of_a_core_are_one_core(monkeypatch, tmp_path):
    for cpu in range(4):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text("0\n")
        (folder / "core_id").write_text(f"{cpu % 2}\n")
    monkeypatch.setattr(environment, "_CPUS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 9})  # nothing is known of the last one
    assert environment.num_cores() == 3
