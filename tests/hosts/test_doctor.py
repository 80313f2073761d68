"""``specplug doctor`` on the reference host."""

import json
import subprocess
import sys

import pytest

from vllm_specplug.hosts.compat.check import check_runner
from vllm_specplug.tools import doctor


def test_the_plugin_is_active_here():
    command = [sys.executable, "-m", "vllm_specplug.tools.cli", "doctor", "--json"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    findings = {finding["name"]: finding for finding in json.loads(process.stdout)}
    assert [finding["blocks"] for finding in findings.values() if finding["blocks"]] == []
    assert process.returncode == 0
    assert findings["vLLM"]["value"].startswith("vllm")
    assert findings["runner"]["value"].startswith("V1")


@pytest.mark.parametrize(
    ("kind", "runner", "active"), [("cuda", "V2", True), ("cuda", "V1", True), ("other", "V1", False)]
)
def test_other_platforms(monkeypatch, kind, runner, active):
    from vllm_specplug.hosts.probes import platform_probe as probe

    monkeypatch.setattr(probe, "find_platform", lambda: ("SomePlatform", kind))
    monkeypatch.setattr(probe, "find_runner", lambda: (runner, "for a test"))
    findings = [check() for check in (doctor._vllm, doctor._platform, doctor._runner)]
    has_symbols = check_runner(runner, on_cpu=False).supported
    assert any(finding.blocks for finding in findings) != (active and has_symbols)
    assert bool(findings[1].hint) == (kind == "cuda")
