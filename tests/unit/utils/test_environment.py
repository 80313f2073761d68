"""What is read off this machine."""

from __future__ import annotations

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
    assert environment.is_slow_in_bfloat16() == slow


def test_available_memory(monkeypatch, tmp_path):
    assert 0 < environment.available_gib() < 1e5
    monkeypatch.setattr(environment, "Path", lambda _: tmp_path / "none")
    assert environment.available_gib() is None
