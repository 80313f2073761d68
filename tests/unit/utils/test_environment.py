"""What is read off this machine."""

from __future__ import annotations

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
