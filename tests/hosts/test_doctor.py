"""``specplug doctor`` on the reference host."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_specplug.cli import doctor
from vllm_specplug.vllm.check import check_runner
from vllm_specplug.vllm.installation import Installation
from vllm_specplug.vllm.manifest import MANIFEST, MANIFEST_V2, VllmSymbol
from vllm_specplug.vllm.sources import installed_sources


def test_the_plugin_is_active_here():
    command = [sys.executable, "-m", "vllm_specplug.cli.cli", "doctor", "--json"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    findings = {finding["name"]: finding for finding in json.loads(process.stdout)}
    assert [finding["blocks"] for finding in findings.values() if finding["blocks"]] == []
    assert process.returncode == 0
    assert findings["vLLM"]["value"].startswith("vllm")
    assert findings["runner"]["value"].startswith("V1")


def test_vllm_is_asked_without_importing_it():
    """Importing vLLM takes most of ten seconds; it can still be imported after the examination."""
    code = """
import os, sys
from vllm_specplug.cli import doctor
from vllm_specplug.vllm import installation
for switch, runner in ("1", "V2"), ("0", "V1"):
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = switch
    installation.examine.cache_clear()
    findings = {finding.name: finding.value for finding in doctor.examine()}
    assert findings["runner"].startswith(runner)
    assert not [name for name in sys.modules if name == "vllm" or name.startswith(("vllm.", "torch._inductor"))]
from vllm import LLM, envs
from vllm.platforms import current_platform
assert findings["platform"] == type(current_platform).__name__ and not envs.VLLM_USE_V2_MODEL_RUNNER
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize("manifest", [MANIFEST, MANIFEST_V2])
def test_source_files_say_what_an_import_says(manifest):
    """Of symbols that are there, of one that is missing, and of one with other parameters."""
    wrong = replace(next(symbol for symbol in manifest if symbol.parameters), parameters=("another",))
    sources = installed_sources()
    for symbol in (*manifest, wrong, VllmSymbol("vllm.config:Gone"), VllmSymbol("vllm.gone:Gone")):
        read, imported = sources.problem(symbol), symbol.problem()
        assert (read or "") == (imported or "").split(" (")[0] if "missing" in (imported or "") else read == imported


def test_the_operators_are_looked_for_where_they_are_built(monkeypatch, tmp_path):
    from torch.utils import cpp_extension

    from vllm_specplug.cpu.kernels import cpu_ops

    def build(name, *args, build_directory, **kwargs):
        (Path(build_directory) / f"{name}.so").touch()

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "load", build)
    monkeypatch.setattr(cpu_ops.torch.ops, "load_library", lambda path: None)
    assert "not built" in doctor._attention().value
    cpu_ops._load()
    assert "are built" in doctor._attention().value


@pytest.mark.parametrize(
    ("kind", "runner", "active"), [("cuda", "V2", True), ("cuda", "V1", False), ("other", "V1", False)]
)
def test_other_platforms(monkeypatch, kind, runner, active):
    monkeypatch.setattr(doctor, "_installation", lambda: Installation("SomePlatform", kind, runner, "for a test"))
    findings = [check() for check in (doctor._vllm, doctor._platform, doctor._runner)]
    has_symbols = check_runner(runner).supported
    assert any(finding.blocks for finding in findings) != (active and has_symbols)
    assert bool(findings[1].hint) == (kind == "cuda")


@pytest.mark.parametrize("slow", [True, False])
def test_a_cpu_without_bfloat16_is_advised_to_serve_in_float32(monkeypatch, slow):
    monkeypatch.setattr(doctor, "_installation", lambda: Installation("CpuPlatform", "cpu", "V1", "for a test"))
    monkeypatch.setattr(doctor, "lacks_avx512", lambda: slow)
    assert ("--dtype float32 " in doctor.recommend()) == ("--dtype float32" in doctor._torch().hint) == slow
    monkeypatch.setattr(doctor, "_installation", lambda: Installation("CudaPlatform", "cuda", "V2", "for a test"))
    assert not doctor._torch().hint and "float32" not in doctor.recommend()
